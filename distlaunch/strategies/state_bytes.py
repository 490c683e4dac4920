"""A state as bytes and back: what a process may read that came over a network. Nothing in it can run code."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np

from distlaunch.strategies.protocol import State

_INDEX = "index"


def to_bytes(state: State) -> bytes:
    """An npz archive. Raises TypeError for arrays of Python objects, which only pickle could hold."""
    arrays, foreign = {}, {}
    for position, (name, value) in enumerate(state.items()):
        if value.dtype.hasobject:
            raise TypeError(f"{name}: got an array of the type {value.dtype}; only plain numbers and texts can be sent")
        if _is_foreign(value.dtype):
            foreign[position] = value.dtype.name
            value = value.view(f"u{value.dtype.itemsize}")  # npz would keep the bytes, and forget their type
        arrays[str(position)] = value
    # names are beside the arrays: they may hold what the name of a file in an archive may not
    index = json.dumps({"names": list(state), "foreign": foreign}).encode()
    file = io.BytesIO()
    np.savez(file, **{_INDEX: np.frombuffer(index, np.uint8)}, **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> State:
    """The inverse of `to_bytes`. Raises ValueError for anything else."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        index = json.loads(archive[_INDEX].tobytes())
        foreign = {int(position): getattr(ml_dtypes, name) for position, name in index["foreign"].items()}
        arrays = [archive[str(position)] for position in range(len(index["names"]))]
    typed = (value.view(foreign[at]) if at in foreign else value for at, value in enumerate(arrays))
    return dict(zip(index["names"], typed, strict=True))


def _is_foreign(dtype: np.dtype) -> bool:
    """Whether npz does not know the type, such as bfloat16: they come from ml_dtypes and are stored as integers."""
    return dtype.isbuiltin == 2
