"""Assigns to variables with a copy on each replica without reading them afterwards."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import tf

_VARIABLE = "keras.src.backend.tensorflow.core.Variable"
_SUMMED = "tensorflow.python.distribute.values.SyncOnReadVariable"

PATCH = Patch(
    symbols=(
        Symbol(f"{_VARIABLE}._direct_assign", "(self, value)"),
        Symbol(f"{_SUMMED}.assign", "(self, value, use_locking=False, name=None, read_value=True)"),
    ),
    why="Outside of a replica's step, TensorFlow reads such a variable after it was assigned, and for a metric this is "
    "a sum over all replicas. Keras does not use the result. For the four variables of a loss and an accuracy, the "
    "sums of a reset take 40 ms over two workers.",
    until="Keras assigns with read_value=False.",
)


@functools.cache
def install() -> None:
    """Replace the assignment in all Keras variables; a second call does nothing."""
    PATCH.check()
    variable, summed = internal(_VARIABLE), internal(_SUMMED)
    assign = variable._direct_assign

    def assign_only(self: Any, value: Any) -> None:
        if isinstance(self._value, summed):
            self._value.assign(tf.cast(value, self._value.dtype), read_value=False)
        else:
            assign(self, value)

    variable._direct_assign = assign_only
