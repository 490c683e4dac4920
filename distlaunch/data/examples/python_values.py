"""Conversion of what `__getitem__` returns to arrays, without TensorFlow: reader processes do not import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_arrays(item: Any) -> Any:
    """Return an item with arrays for leaves. A list of values becomes an array; the outermost is the tuple (x, y)."""
    if isinstance(item, (tuple, list)):
        return tuple(_inner(part) for part in item)
    return _inner(item)


def _inner(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {name: _inner(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(_inner(value) for value in part)
    return as_array(part)


def as_array(leaf: Any) -> np.ndarray:
    """Return a value as an array: floats of Python as float32, as in TensorFlow, and text as bytes."""
    array = np.asarray(leaf)
    if array.dtype == np.float64 and not isinstance(leaf, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return np.char.encode(array, "utf-8").astype(object) if array.dtype.kind == "U" else array
