"""Converts the results of `__getitem__` to arrays, without TensorFlow, which reader processes do not import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_arrays(item: Any) -> Any:
    """Return an item with arrays as leaves.

    Lists of values become arrays, except the outermost list, which becomes a tuple such as (x, y).
    """
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
    """Return a value as an array; Python's floats become float32, as in TensorFlow, and text becomes bytes."""
    array = np.asarray(leaf)
    if array.dtype == np.float64 and not isinstance(leaf, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return np.char.encode(array, "utf-8").astype(object) if array.dtype.kind == "U" else array
