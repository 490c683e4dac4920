"""Creates an optimizer's slots in a different scope from its other variables."""

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
    why="Keras does not tell which variable a slot belongs to, so the slot could be on a different parameter server "
    "from the one that computes the update.",
    until="Keras places slots on the devices of their variables.",
)


def make_slots_in(
    optimizer: Any, scope: Callable[[Any], AbstractContextManager[Any]], made: Callable[[Any, Any], None]
) -> None:
    """Create the optimizer's slots in the scopes that `scope` returns, from here on.

    Args:
        scope: called with the variable that a slot belongs to; returns the slot's scope.
        made: called with each variable and its new slot.
    """
    PATCH.check()
    # from the class, since the object's own is replaced below
    add = type(optimizer).add_variable_from_reference

    def add_in_scope(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(reference_variable):
            slot = add(self, reference_variable, *args, **kwargs)
        made(reference_variable, slot)
        return slot

    optimizer.add_variable_from_reference = types.MethodType(add_in_scope, optimizer)
