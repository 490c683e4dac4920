"""Format of state files: safetensors, which other tools can read.

A safetensors file consists of the length of a header (8 bytes), the header (JSON: type, shape and position of each
array), and the arrays' bytes. The format has no strings, complex numbers or 4-bit numbers, and only one byte order.
Arrays of other types are stored as bytes, with one more dimension; `__metadata__` has their types. A process that holds
shards of variables writes each shard as a separate array, whose position in the variable is in `__metadata__`. Reading
a file cannot run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from distlaunch.strategies.state import ShardSlice, State

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
STATE_FILE = "state.safetensors"
_METADATA, _TYPES, _SLICES = "__metadata__", "types", "parts"
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_OF_NAMES = {theirs: name for name, theirs in _NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """An array of a file.

    Attributes:
        begin, end: range of its bytes, counted from the end of the header.
        shard: position in the variable; None if the array is a whole variable.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    shard: ShardSlice | None


def buffers_of(state: State, slices: Mapping[str, ShardSlice]) -> list[memoryview]:
    """Return all bytes of a file in order: the header, and then the arrays.

    Args:
        slices: positions of the arrays that are shards, by name.

    Raises:
        TypeError: an array contains Python objects, which only pickle could store.
    """
    # largest elements first, so that each array begins at a multiple of its element size
    placed = sorted(state, key=lambda name: -_itemsize(state[name]))
    header = _header(state, placed, slices)
    head = memoryview(len(header).to_bytes(8, "little") + header)
    return [head, *(bytes_of(np.require(state[name], requirements="C")) for name in placed)]


def header_bytes(head: bytes) -> int:
    """Return the length of the header, given the first 8 bytes of a file.

    Raises:
        ValueError: these bytes are not a valid length.
    """
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("its header is truncated or has an invalid length")
    return length


def read_header(text: bytes) -> dict[str, Entry]:
    """Return the entries of a header, in its order.

    Raises:
        ValueError: the header is wrong.
    """
    try:
        header = json.loads(text)
    except ValueError:  # the parser's message would not help
        raise ValueError("its header is damaged") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    try:
        entries = _entries(header)
        total = sum(entry.end - entry.begin for entry in entries.values())
        if total != max((entry.end for entry in entries.values()), default=0):
            raise ValueError("its header is wrong: there are gaps between the arrays")
        for entry in entries.values():  # raises an error for invalid shapes
            np.empty(entry.shape, entry.dtype)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"its header is wrong: {type(error).__name__}: {error}") from None
    return entries


def names_by_position(entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of the arrays in the order in which their bytes are stored."""
    return sorted(entries, key=lambda name: entries[name].begin)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the raw bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def _entries(header: dict[str, Any]) -> dict[str, Entry]:
    metadata = header.pop(_METADATA)
    try:
        types, slices = json.loads(metadata[_TYPES]), json.loads(metadata.get(_SLICES, "{}"))
    except json.JSONDecodeError:
        raise ValueError("its header is damaged") from None
    entries = {}
    for name, facts in header.items():
        shape = tuple(facts["shape"] if name not in types else facts["shape"][:-1])
        dtype = _dtype(types.get(name) or _OF_NAMES[facts["dtype"]])
        begin, end = facts["data_offsets"]
        # checked before memory is allocated, because a damaged header may have any size
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"its header is wrong: type and shape of '{name}' do not match its length: {facts}")
        entries[name] = Entry(dtype, shape, begin, end, _slice(slices[name], shape) if name in slices else None)
    return entries


def _slice(facts: dict[str, Any], shard: tuple[int, ...]) -> ShardSlice:
    place = ShardSlice(facts["of"], tuple(facts["shape"]), tuple(facts["start"]))
    ends = [first + size for first, size in zip(place.start, shard, strict=True)]
    if any(first < 0 or end > size for first, end, size in zip(place.start, ends, place.shape, strict=True)):
        raise ValueError(f"its header is wrong: '{place.of}' has no part {facts}")
    return place


def _header(state: State, placed: list[str], slices: Mapping[str, ShardSlice]) -> bytes:
    """Return the header, padded with spaces so that the arrays begin at a multiple of 8 bytes."""
    ends = np.cumsum([state[name].nbytes for name in placed], dtype=np.int64).tolist()
    places = {name: [end - state[name].nbytes, end] for name, end in zip(placed, ends, strict=True)}
    for name, value in state.items():
        if value.dtype.hasobject:
            raise TypeError(f"{name}: got an array of the type {value.dtype}; only numbers and text can be saved")
    types = {name: _type_name(value.dtype) for name, value in state.items() if not _is_known(value.dtype)}
    metadata = {_TYPES: json.dumps(types)}
    if slices:
        metadata[_SLICES] = json.dumps({name: asdict(place) for name, place in slices.items()})
    facts: dict[str, Any] = {_METADATA: metadata}
    for name, value in state.items():
        assert name != _METADATA
        kind, shape = (
            ("U8", [*value.shape, value.itemsize]) if name in types else (_NAMES[value.dtype.name], value.shape)
        )
        facts[name] = {"dtype": kind, "shape": list(shape), "data_offsets": places[name]}
    text = json.dumps(facts, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _is_known(dtype: np.dtype) -> bool:
    return dtype.name in _NAMES and dtype.isnative


def _itemsize(array: np.ndarray) -> int:
    # other types are stored as bytes, which need no alignment
    return array.itemsize if _is_known(array.dtype) else 1


def _type_name(dtype: np.dtype) -> str:
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
