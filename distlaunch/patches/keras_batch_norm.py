"""Makes `BatchNormalization(synchronized=True)` possible on JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol, replaced_attributes

PATCH = Patch(
    symbols=(Symbol("keras.layers.BatchNormalization.__init__", "(self, ..., synchronized=False, ...)"),),
    why="Keras refuses `synchronized=True` on JAX, although a mesh always uses the statistics of the whole batch.",
    until="Keras accepts it on JAX.",
)


@contextlib.contextmanager
def accept_synchronized() -> Iterator[None]:
    """Accept `BatchNormalization(synchronized=True)` in this context, because a mesh uses the whole batch anyway."""
    PATCH.check()
    cls = keras.layers.BatchNormalization
    original = cls.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        # the constructor raises ValueError on any backend but TensorFlow
        kwargs.pop("synchronized", None)
        original(self, *args, **kwargs)

    with replaced_attributes([(cls, "__init__", initialize)]):
        yield
