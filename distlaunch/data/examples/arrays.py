"""The arrays that a data function returns, as tensors; or what is wrong with them, in words."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import listed

_KEY = ("data", "function")
_MOST_NAMED = 12


def as_tensors(data: Any, limit: int | None) -> tuple[Any, int]:
    """The structure with a tensor for each array, and the number of examples.

    Args:
        limit: take no more of the examples.

    Raises:
        ConfigError: values without rows, of types that no tensor has, or different numbers of rows.
    """
    data = tuple(data) if isinstance(data, (tuple, list)) else data
    given = tf.nest.flatten(data)
    arrays = [np.asarray(leaf) for leaf in given]
    if (single := next((leaf for leaf, array in zip(given, arrays, strict=True) if array.ndim == 0), _KEY)) is not _KEY:
        raise ConfigError(Problem(_KEY, f"got {_single(single)}"))
    if len({len(array) for array in arrays}) != 1:
        shapes = [array.shape for array in arrays]
        raise ConfigError(Problem(_KEY, f"the arrays differ in length: their shapes are {shapes}"))
    number = len(arrays[0]) if limit is None else min(len(arrays[0]), limit)
    with tf.device("CPU:0"):
        tensors = [_tensor(leaf, array, number) for leaf, array in zip(given, arrays, strict=True)]
    return tf.nest.pack_sequence_as(data, tensors), number


def _single(leaf: Any) -> str:
    """What a value without rows is, and what to write instead."""
    if isinstance(leaf, Iterator):
        name = "a Python generator" if isinstance(leaf, Generator) else f"an iterator ({type(leaf).__name__})"
        hint = "tf.data.Dataset.from_generator(function, output_signature=...), or a class with __len__ and __getitem__"
        return f"{name}, which can be read only once, and not from where a resumed run goes on; give {hint}"
    if isinstance(leaf, (int, float, complex, str, bytes, bool, np.generic)):
        return "single values, as Python lists have; expected arrays with an example in each row: np.array(...)"
    return f"{type(leaf).__name__}; expected arrays with rows, a tf.data.Dataset, or examples by number"


def _tensor(leaf: Any, array: np.ndarray, number: int) -> tf.Tensor:
    try:
        return tf.constant(array[:number])
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(_KEY, _why(leaf, array))) from error


def _why(leaf: Any, array: np.ndarray) -> str:
    if hasattr(leaf, "columns") and hasattr(leaf, "dtypes"):
        return _why_no_frame(leaf)
    name = f" '{leaf.name}'" if isinstance(getattr(leaf, "name", None), str) else ""
    if array.dtype != object:
        return f"got an array{name} of {array.dtype}; expected numbers or text; convert it, such as to float32"
    kinds = sorted({type(value).__name__ for value in array.flat})
    return (
        f"got an array{name} of Python objects ({', '.join(kinds)}); expected only numbers or only text; convert it, "
        "and replace what is missing"
    )


def _why_no_frame(frame: Any) -> str:
    columns = listed([f"{name} {dtype}" for name, dtype in zip(frame.columns, frame.dtypes, strict=True)], _MOST_NAMED)
    return (
        f"got a DataFrame with columns that do not make one array: {columns}; return dict(frame) instead, so that "
        "the model, or a keras.utils.FeatureSpace as data.preprocessing, takes each column by name; or numbers alone: "
        'frame[["a", "b"]].to_numpy("float32")'
    )
