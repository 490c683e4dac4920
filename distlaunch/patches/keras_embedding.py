"""Replaces the function with which an Embedding layer looks up rows."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(Symbol("keras.layers.Embedding.call", "(self, inputs)"),),
    why="Keras gathers rows from one tensor, so a table that is split over parameter servers would be joined first.",
    until="Keras looks up embeddings in split tables.",
)


def look_up_by(layer: keras.layers.Embedding, lookup: Callable[[Any], Any], check: Callable[[Any], None]) -> None:
    """Replace the layer's call.

    Args:
        lookup: maps ids to rows.
        check: called with the layer before each lookup; raises an error if `lookup` cannot be used.
    """
    PATCH.check()

    def call(self: Any, inputs: Any) -> Any:
        check(self)
        # like Keras's own call
        ids = keras.ops.cast(inputs, "int32") if inputs.dtype not in ("int32", "int64") else inputs
        return keras.ops.cast(lookup(ids), self.compute_dtype)

    layer.call = types.MethodType(call, layer)
