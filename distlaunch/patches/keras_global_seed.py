"""Makes draws without a seed, from Keras's global generator, work within the steps of replicas."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from distlaunch.patches.symbols import Patch, Symbol, internal, private

_HOME = "keras.src.random.seed_generator"
_GET = Symbol(f"{_HOME}.global_seed_generator", "()")

PATCH = Patch(
    symbols=(_GET,),
    why="Keras makes its global generator where it is first asked for, which cannot be within a traced step, and keeps "
    "one for each thread; replicas are traced in threads of their own.",
    until="Keras keeps one global generator in a process, and makes it before a step is traced.",
)

_shared: dict[str, keras.random.SeedGenerator] = {}


def share_generator(model: keras.Model) -> None:
    """Make the global generator in the present scope, and let all threads of a strategy use it.

    Args:
        model: its state includes that of the generator from here on, so that a resumed run draws on.
    """
    PATCH.check()
    _install()
    _shared["generator"] = generator = _GET.get()()
    tracker, generators = private(model, "_tracker"), private(model, "_seed_generators")
    if any(known is generator for known in generators):
        return
    was_locked = tracker.locked
    tracker.unlock()  # a model that is built takes no new state
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
