"""Fits arrays to the inputs of an exported model, or reports what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distlaunch.base.errors import UsageError
from distlaunch.serving.exported_model import ANY, Spec, adapted, dtype_name

Arrays = dict[str, np.ndarray]


def fitted(values: Mapping[str, Any], inputs: Sequence[Spec], where: str) -> Arrays:
    """Arrays as the inputs want them. Raises UsageError, which begins with `where`."""
    arrays = {spec.name: _fit(np.asarray(values[spec.name]), spec, where) for spec in inputs}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"{where}: the inputs differ in rows: {listed}")
    if 0 in lengths.values():
        raise UsageError(f"{where}: there are no rows in it")
    return arrays


def takes(inputs: Sequence[Spec]) -> str:
    """What a model takes, in words: `the model takes x: float32[?,10]`."""
    return "the model takes " + ", ".join(f"{spec.name}: {spec.kind}" for spec in inputs)


def quoted(names: Any) -> str:
    parts = [f"'{name}'" for name in names]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:8], f"... ({len(parts)} in all)"])


def _fit(array: np.ndarray, spec: Spec, where: str) -> np.ndarray:
    got = f"{where}: {spec.name}: got {dtype_name(array)}[{','.join(map(str, array.shape))}]"
    if array.ndim == 0:
        raise UsageError(f"{got}, a single value; expected rows; {takes([spec])}")
    text = array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and all(isinstance(v, (str, bytes)) for v in array.flat)
    )
    if not text and array.dtype.kind not in "biuf" and dtype_name(array) != "bfloat16":
        raise UsageError(f"{where}: {spec.name}: got neither numbers nor text; {takes([spec])}")
    if spec.dtype != ANY and text != (spec.dtype == "string"):
        raise UsageError(f"{got}; {takes([spec])}")
    if not text and spec.dtype != ANY:
        _check_range(array, spec, where)
    array = adapted(_encoded(array) if text else array, spec)
    sizes = array.shape if spec.shape is None else spec.shape
    if array.ndim != len(sizes) or any(
        size is not None and size != own for size, own in zip(sizes[1:], array.shape[1:], strict=True)
    ):
        raise UsageError(f"{got}; {takes([spec])}")
    return array


def _check_range(array: np.ndarray, spec: Spec, where: str) -> None:
    """Numbers that the input's type would change are mistakes."""
    if spec.dtype == "bool" or not spec.dtype.startswith(("int", "uint")):
        return
    limits = np.iinfo(spec.dtype)
    # `astype` would wrap and cut without a word
    wrong = (array < limits.min) | (array > limits.max) | (array != np.trunc(array))
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        place = f"row {at[0]}" + (f", at {list(at[1:])}" if at[1:] else "")
        message = f"{where}: {spec.name}: {place}: got {array[at]}; expected whole numbers from {limits.min}"
        raise UsageError(f"{message} to {limits.max} ({spec.dtype})")


def _encoded(array: np.ndarray) -> np.ndarray:
    flat = [value.encode() if isinstance(value, str) else value for value in array.reshape(-1).tolist()]
    # filled afterwards: `np.array` would make fixed-width bytes, which lose zeros at the end
    encoded = np.empty(len(flat), dtype=object)
    encoded[:] = flat
    return encoded.reshape(array.shape)
