"""The state as a stream of bytes, in a file or over a network: safetensors, which other tools read.

npz of formats 1 and 2 is only read.

safetensors is the length of a header (8 bytes), the header (JSON: type, shape and place of each array), and the arrays'
bytes. It has no strings, complex numbers, 4-bit numbers or other byte orders: such an array is kept as bytes, with one
more dimension, and `__metadata__` tells its type. Arrays are written and read piece by piece, each checksummed on its
way: no file is read twice, and the interpreter's lock is never held for long. Nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State

_MOST_HEADER_BYTES = 100_000_000  # as the safetensors library has it
STATE_FILE, OLDER_STATE_FILE = "state.safetensors", "state.npz"
_METADATA, _TYPES = "__metadata__", "types"
_PIECE_BYTES = 1 << 20
"""Small enough for a core's cache, so that what is checksummed is not fetched from memory again to be written: steps
that run meanwhile need the memory, too."""
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_OF_NAMES = {theirs: name for name, theirs in _NAMES.items()}


def write_state(file: BinaryIO, state: State) -> str:
    """Writes the arrays; returns the SHA-256 of what it wrote.

    Raises:
        OSError: a full disk.
        TypeError: an array of Python objects, which only pickle could hold.
    """
    digest = hashlib.sha256()
    # the largest elements first: so each array begins at a multiple of its elements' size
    placed = sorted(state, key=lambda name: -_itemsize(state[name]))
    header = _header(state, placed)
    for piece in (len(header).to_bytes(8, "little"), header):
        digest.update(piece)
        file.write(piece)
    for name in placed:
        for piece in _pieces(state[name]):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def read_state(file: BinaryIO, *, checksum: bool = True) -> tuple[State, str]:
    """The inverse of `write_state`.

    Args:
        file: read from where it stands, once and in order.
        checksum: whether it is wanted.

    Returns:
        The arrays, and the SHA-256 of what was read; empty if it was not wanted.

    Raises:
        ValueError: it is no such file.
    """
    digest = hashlib.sha256() if checksum else None
    header = _read_header(file, digest)
    try:
        state, places = _empty_arrays(header)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"its header is wrong: {type(error).__name__}: {error}") from None
    for name in sorted(state, key=places.__getitem__):
        for piece in _pieces(state[name]):
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise ValueError(f"'{name}' is cut off")
            if digest is not None:
                digest.update(piece)
    return state, "" if digest is None else digest.hexdigest()


def _read_header(file: BinaryIO, digest: Any) -> dict[str, Any]:
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > _MOST_HEADER_BYTES:
        raise ValueError("its header is cut off or has no sensible length")
    text = file.read(length)
    if digest is not None:
        digest.update(head + text)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    return header


def _empty_arrays(header: dict[str, Any]) -> tuple[State, dict[str, int]]:
    """Arrays to be filled, in the order of the header, and where the bytes of each begin."""
    types = json.loads(header.pop(_METADATA)[_TYPES])
    state, places, total = {}, {}, 0
    for name, told in header.items():
        shape = told["shape"] if name not in types else told["shape"][:-1]
        dtype = _dtype(types.get(name) or _OF_NAMES[told["dtype"]])
        begin, end = told["data_offsets"]
        # checked before memory is taken: a header may claim any size
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"its header is wrong: '{name}' cannot be {told}")
        state[name], places[name] = np.empty(shape, dtype), begin
        total += end - begin
    if total != max((told["data_offsets"][1] for told in header.values()), default=0):
        raise ValueError("its header is wrong: there is room between the arrays")
    return state, places


def read_npz(file: BinaryIO) -> State:
    """The state as formats 1 and 2 have it: numbered arrays, with their names and types beside them."""
    with np.load(file, allow_pickle=False) as archive:
        *names, _ = map(str, archive["names"])
        state = {name: archive[str(index)] for index, name in enumerate(names)}
        foreign = json.loads(archive[str(len(names))].tobytes())
    return {n: v.view(getattr(ml_dtypes, foreign[n])) if n in foreign else v for n, v in state.items()}


def _header(state: State, placed: list[str]) -> bytes:
    """Padded with spaces, so that what follows it begins at a multiple of 8 bytes."""
    ends = np.cumsum([state[name].nbytes for name in placed], dtype=np.int64).tolist()
    places = {name: [end - state[name].nbytes, end] for name, end in zip(placed, ends, strict=True)}
    for name, value in state.items():
        if value.dtype.hasobject:
            raise TypeError(f"{name}: got an array of the type {value.dtype}; only plain numbers and texts can be kept")
    types = {name: _type_name(value.dtype) for name, value in state.items() if not _is_known(value.dtype)}
    told: dict[str, Any] = {_METADATA: {_TYPES: json.dumps(types)}}
    for name, value in state.items():
        assert name != _METADATA
        kind, shape = (
            ("U8", [*value.shape, value.itemsize]) if name in types else (_NAMES[value.dtype.name], value.shape)
        )
        told[name] = {"dtype": kind, "shape": list(shape), "data_offsets": places[name]}
    text = json.dumps(told, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    if not array.nbytes:
        return
    # a slice or a transposed array has no bytes in one piece
    whole = _bytes_of(np.require(array, requirements="C"))
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _is_known(dtype: np.dtype) -> bool:
    return dtype.name in _NAMES and dtype.isnative


def _itemsize(array: np.ndarray) -> int:
    # kept as bytes, so they need no alignment
    return array.itemsize if _is_known(array.dtype) else 1


def _type_name(dtype: np.dtype) -> str:
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
