"""Lets an Embedding layer look its rows up in another way than by its one table."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# (what pyright infers of Keras's classes is often wrong)
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(Symbol("keras.layers.Embedding.call", "(self, inputs)"),),
    why="Keras gathers rows from one tensor; a table that is split over parameter servers would be joined for it.",
    until="Keras looks embeddings up in tables that are split.",
)


def look_up_by(layer: keras.layers.Embedding, lookup: Callable[[Any], Any], check: Callable[[Any], None]) -> None:
    """Replaces the layer's call.

    Args:
        lookup: ids to rows.
        check: called with the layer before each look-up; raises if it cannot be done so.
    """
    PATCH.check()

    def call(self: Any, inputs: Any) -> Any:
        check(self)
        # as Keras's own call does
        ids = keras.ops.cast(inputs, "int32") if inputs.dtype not in ("int32", "int64") else inputs
        return keras.ops.cast(lookup(ids), self.compute_dtype)

    layer.call = types.MethodType(call, layer)
