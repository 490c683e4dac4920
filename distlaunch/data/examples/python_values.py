"""What `__getitem__` returns, as arrays. Without TensorFlow: processes that read for a task need none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_arrays(item: Any) -> Any:
    """An item with arrays for leaves. A list of values is an array; the outermost is the tuple (x, y)."""
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
    """Python's floats are float32, as in TensorFlow; text is bytes."""
    array = np.asarray(leaf)
    if array.dtype == np.float64 and not isinstance(leaf, (np.ndarray, np.generic)):
        return array.astype(np.float32)
    return np.char.encode(array, "utf-8").astype(object) if array.dtype.kind == "U" else array
