"""Lets an optimizer's slots be made in another scope than its other variables."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(
        Symbol(
            "keras.optimizers.Optimizer.add_variable_from_reference",
            "(self, reference_variable, name=None, initializer='zeros')",
        ),
    ),
    why="Keras does not say which variable a slot belongs to, so parameter servers would hold it anywhere, "
    "far from where the update is computed.",
    until="Keras places slots beside their variables.",
)


def make_slots_in(
    optimizer: Any, scope: Callable[[Any], AbstractContextManager[Any]], made: Callable[[Any, Any], None]
) -> None:
    """From here on the optimizer makes slots so.

    Args:
        scope: given the variable that a slot is for; the slot is made within it.
        made: called with each variable and its new slot.
    """
    PATCH.check()
    # of the class, since the object's own is replaced below
    add = type(optimizer).add_variable_from_reference

    def add_in_scope(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(reference_variable):
            slot = add(self, reference_variable, *args, **kwargs)
        made(reference_variable, slot)
        return slot

    optimizer.add_variable_from_reference = types.MethodType(add_in_scope, optimizer)
