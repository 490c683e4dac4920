"""A scope in which assignments to Keras variables are collected instead of carried out."""

from __future__ import annotations

from typing import Any

import keras

from distlaunch.patches.keras_private import value_of


class CollectedScope(keras.StatelessScope):
    """Scope in which an assigned variable has its new value; any other variable is read in place."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)

    def get_current_value(self, variable: Any) -> Any:
        assigned = super().get_current_value(variable)
        return value_of(variable) if assigned is None else assigned  # with the handle that a gradient tape watches

    def assigned(self, variable: Any) -> Any | None:
        """Return the value that a variable was assigned within the scope, or None if it was not."""
        return super().get_current_value(variable)
