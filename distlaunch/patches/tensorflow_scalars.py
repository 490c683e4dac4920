"""Makes variables with a copy on each replica convertible to numbers, such as in `float(optimizer.learning_rate)`."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal

_CLASS = "tensorflow.python.distribute.values.DistributedVariable"

PATCH = Patch(
    symbols=(Symbol(f"{_CLASS}.numpy", "(self)"),),
    why="float() and int() convert TensorFlow variables; for a variable with copies they raise TypeError, so that "
    "callbacks that read the learning rate fail on replicas.",
    until="DistributedVariable has __float__, __int__ and __complex__, as ResourceVariable has.",
)


@functools.cache
def install() -> None:
    """Add conversions to all variables with copies; a second call does nothing."""
    PATCH.check()
    variables = internal(_CLASS)
    for number in (float, int, complex):
        setattr(variables, f"__{number.__name__}__", _conversion(number))


def _conversion(number: type) -> Any:
    def convert(variable: Any) -> Any:
        return number(variable.numpy())

    return convert
