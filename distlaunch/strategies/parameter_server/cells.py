"""Stand-ins for variables of a model while a worker traces its step."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import put_value, value_of
from distlaunch.strategies.stand_in import StandIn


class Cell(StandIn):
    """Stands in a Keras variable while a block is traced: it holds a tensor, and assigning replaces that."""

    def __init__(self, tensor: tf.Tensor, name: str) -> None:
        self.tensor, self._name = tensor, name
        self._graph = current_graph()
        self.assignments = 0

    @property
    def dtype(self) -> tf.DType:
        return self.tensor.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.tensor.shape

    def as_tensor(self) -> tf.Tensor:
        return self.tensor

    def assign(self, value: Any) -> None:
        # a tensor of a branch or a loop body cannot be used outside of it
        if current_graph() is not self._graph:
            message = (
                f"the step updates '{self._name}' inside a condition or loop, which parameter_server cannot follow"
            )
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; update it in every step"))
        self.tensor = tf.cast(value, self.tensor.dtype)
        self.assignments += 1


def current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def as_cells(variables: list[Any], tensors: list[tf.Tensor]) -> Iterator[list[Cell]]:
    """Within it, the variables are cells that hold these tensors."""
    kept = [value_of(variable) for variable in variables]
    cells = [Cell(tensor, variable.path) for variable, tensor in zip(variables, tensors, strict=True)]
    for variable, cell in zip(variables, cells, strict=True):
        put_value(variable, cell)
    try:
        yield cells
    finally:
        for variable, value in zip(variables, kept, strict=True):
            put_value(variable, value)
