"""Makes random numbers without a seed, from Keras's global generator, work within the steps of replicas."""

from __future__ import annotations

import functools
from typing import Any

import keras

from distlaunch.patches.keras_private import put_path
from distlaunch.patches.symbols import Patch, Symbol, internal, private
from distlaunch.patches.tensorflow_late import tf

_HOME = "keras.src.random.seed_generator"
_GET = Symbol(f"{_HOME}.global_seed_generator", "()")

PATCH = Patch(
    symbols=(_GET,),
    why="Keras creates its global generator at its first use, which is impossible within a traced step, and keeps one "
    "per thread; each replica is traced in a separate thread.",
    until="Keras keeps one global generator per process, and creates it before a step is traced.",
)

GENERATOR = "global_seed_generator/seed_generator_state"
"""Path of the generator's variable in checkpoints; Keras's own has a number that depends on the other generators."""
_shared: dict[str, keras.random.SeedGenerator] = {}


def share_generator(model: keras.Model) -> None:
    """Create the global generator in the current scope, and let all threads of a strategy use it.

    Args:
        model: its state includes the generator's from here on, so that a resumed run continues the sequence.
    """
    PATCH.check()
    _install()
    _shared["generator"] = generator = _GET.get()()
    put_path(generator.state, GENERATOR)
    tracker, generators = private(model, "_tracker"), private(model, "_seed_generators")
    if any(known is generator for known in generators):
        return
    was_locked = tracker.locked
    tracker.unlock()  # a built model accepts no new state
    generators.append(generator)
    if was_locked:
        tracker.lock()


@functools.cache
def _install() -> None:
    home, make = internal(_HOME), _GET.get()

    def global_seed_generator() -> Any:
        generator = _shared.get("generator")
        return generator if generator is not None and tf.distribute.has_strategy() else make()

    home.global_seed_generator = global_seed_generator
