"""A table of a model's layers, for reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from distlaunch.base.plural import listed

MAX_LAYERS = 1_000


def layer_table(model: keras.Model) -> list[dict[str, Any]]:
    """Return the layers of a model and of models within it, at most MAX_LAYERS, in the format of `ModelBuilt`."""
    found: list[dict[str, Any]] = []
    for name, layer in _layers(model, ""):
        if len(found) == MAX_LAYERS:
            break
        found.append(
            {
                "name": name,
                "kind": type(layer).__name__,
                "output": _output_of(layer),
                "parameters": int(layer.count_params()) if layer.built else 0,
                "trainable": bool(layer.trainable),
            }
        )
    return found


def _layers(model: Any, path: str) -> Iterator[tuple[str, Any]]:
    for layer in model.layers:
        if isinstance(layer, keras.Model) and layer.layers:
            yield from _layers(layer, f"{path}{layer.name}/")
        else:
            yield path + layer.name, layer


def _output_of(layer: Any) -> str:
    """Return the types and shapes of a layer's outputs; empty if they are unknown or if it is called several times."""
    with contextlib.suppress(AttributeError, ValueError):
        return listed([_shape(each) for each in keras.tree.flatten(layer.output)], 3)
    return ""


def _shape(tensor: Any) -> str:
    sizes = ",".join("?" if size is None else str(size) for size in tensor.shape)
    return f"{tensor.dtype}[{sizes}]"
