"""Scopes in which assignments to Keras variables are collected and not carried out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from distlaunch.patches.keras_private import value_of
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.stand_in import StandIn


class CollectedScope(keras.StatelessScope):
    """Scope that keeps the values assigned to variables; other variables have their usual values."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)

    def get_current_value(self, variable: Any) -> Any:
        assigned = super().get_current_value(variable)
        # `value_of` returns the variable that a gradient tape watches
        return value_of(variable) if assigned is None else assigned

    def assigned(self, variable: Any) -> Any | None:
        """Return the value that a variable was assigned within the scope, or None if it was not."""
        return super().get_current_value(variable)


class StateScope(CollectedScope):
    """Collected scope in which variables begin with given values.

    Args:
        values: pairs of a variable and a tensor. Variables without a pair have their usual values.
    """

    def __init__(self, values: Iterable[tuple[Any, tf.Tensor]]) -> None:
        super().__init__()
        self._given = {id(variable): _Value(tensor) for variable, tensor in values}

    def get_current_value(self, variable: Any) -> Any:
        assigned, given = self.assigned(variable), self._given.get(id(variable))
        if given is None:
            return super().get_current_value(variable)
        # a step may compute gradients with the values that it has assigned, and update them again
        return given if assigned is None else _Value(tf.convert_to_tensor(assigned))

    def differentiable(self, variables: Iterable[Any]) -> list[tf.Tensor]:
        """Return the current values of those variables that have a gradient."""
        values = [tf.convert_to_tensor(self.get_current_value(variable)) for variable in variables]
        return [value for value in values if value.dtype.is_floating]


class _Value(StandIn):
    """A tensor by which a gradient can be taken where TensorFlow expects a variable."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self._tensor = tensor

    def as_tensor(self) -> tf.Tensor:
        return self._tensor

    @property
    def handle(self) -> tf.Tensor:
        """Tensor by which a gradient tape identifies the value."""
        return self._tensor

    @property
    def dtype(self) -> tf.DType:
        return self._tensor.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self._tensor.shape
