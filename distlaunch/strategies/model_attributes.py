"""Finds what a model holds in its attributes, at any depth: optimizers, and variables that Keras does not list.

Keras finds the layers, metrics and Keras variables of a model. It does not find optimizers beside the compiled one, or
plain variables of TensorFlow, which a model may keep as attributes, in lists and dicts, in layers and models within
it, or in objects of the user's classes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, tf.Tensor, tf.DType)
_CLOSED = frozenset({*sys.stdlib_module_names, "keras", "tensorflow", "jax", "jaxlib", "numpy"})
"""Packages whose objects hold nothing of the model, except layers, modules and containers."""

Found = tuple[str, Any]
"""The attributes that lead to an object, joined by `/`, and the object."""


def found_in(model: keras.Model) -> Iterator[Found]:
    """Return each optimizer and variable that a model holds, once, in the order of its attributes.

    Layers begin a path of their own with their name, since the same layer has several places in a model.
    """
    seen: set[int] = set()
    # a stack instead of recursion: models may be deep
    waiting: list[Found] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.random.SeedGenerator):
            value = value.state
        if isinstance(value, (keras.optimizers.Optimizer, keras.Variable, tf.Variable)):
            yield path, value
        waiting.extend(reversed(list(_within(path, value))))


def _within(path: str, value: Any) -> Iterator[Found]:
    if isinstance(value, (keras.Variable, tf.Variable, keras.metrics.Metric)):
        return
    if isinstance(value, dict):
        yield from ((_joined(path, str(key)), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((_joined(path, str(index)), inner) for index, inner in enumerate(value))
    elif _is_open(value):
        start = value.name if isinstance(value, keras.Layer) and path else path
        # what the user names comes first, so that lists of Keras's own give no names
        for name, inner in sorted(vars(value).items(), key=lambda item: item[0].startswith("_")):
            if not name.startswith(("_self_", "_tracker", "_distlaunch")):
                yield _joined(start, name), inner


def _is_open(value: Any) -> bool:
    """Return True if the attributes of an object may hold parts of the model."""
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, tf.Module, types.SimpleNamespace)):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    root = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and root not in _CLOSED


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
