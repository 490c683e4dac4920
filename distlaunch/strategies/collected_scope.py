"""Scope in which assignments to Keras variables are collected and not carried out."""

from __future__ import annotations

from typing import Any

import keras

from distlaunch.patches.keras_private import value_of


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
