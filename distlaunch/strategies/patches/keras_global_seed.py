"""Lets draws without a seed, from Keras's global generator, work within the steps of replicas."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from distlaunch.strategies.patches.symbols import Patch, Symbol, internal

_HOME = "keras.src.random.seed_generator"
_GET = Symbol(f"{_HOME}.global_seed_generator", "()")

PATCH = Patch(
    symbols=(_GET,),
    why="Keras makes its global generator where it is first asked for, which cannot be within a traced step, and keeps "
    "one for each thread; replicas are traced in threads of their own.",
    until="Keras keeps one global generator in a process, and makes it before a step is traced.",
)

_shared: dict[str, keras.random.SeedGenerator] = {}


def share_generator() -> keras.random.SeedGenerator:
    """Make the global generator in the present scope, and let all threads of a strategy use it."""
    PATCH.check()
    _install()
    _shared["generator"] = generator = _GET.get()()
    return generator


def shared_generator() -> keras.random.SeedGenerator | None:
    """Return what `share_generator` has made last, or None."""
    return _shared.get("generator")


def forget_generator() -> None:
    """Let a model that is built next begin without one."""
    _shared.clear()


@functools.cache
def _install() -> None:
    home, make = internal(_HOME), _GET.get()

    def global_seed_generator() -> Any:
        generator = _shared.get("generator")
        return generator if generator is not None and tf.distribute.has_strategy() else make()

    home.global_seed_generator = global_seed_generator
