"""The state as bytes, in files or over a network: safetensors, which other tools read.

npz of formats 1 and 2 is only read.

safetensors is the length of a header (8 bytes), the header (JSON: type, shape and place of each array), and the arrays'
bytes. It has no strings, complex numbers, 4-bit numbers or other byte orders: such an array is kept as bytes, with one
more dimension, and `__metadata__` has its type. A file of a process that holds parts of variables only has each as an
array of its own; `__metadata__` says which part of what it is. Nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State

_MOST_HEADER_BYTES = 100_000_000  # as the safetensors library has it
STATE_FILE = "state.safetensors"
_METADATA, _TYPES, _CUTS = "__metadata__", "types", "parts"
_STREAM_BYTES = 1 << 20
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_OF_NAMES = {theirs: name for name, theirs in _NAMES.items()}


@dataclass(frozen=True)
class Cut:
    """Which part of a variable an array is.

    Attributes:
        of: the variable's name.
        shape: that of the whole variable.
        start: where the part begins, in each dimension.
    """

    of: str
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def within(self, part: tuple[int, ...]) -> tuple[slice, ...]:
        """Where a part of this shape lies in the whole."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, part, strict=True))


@dataclass(frozen=True)
class Entry:
    """One array of a file.

    Attributes:
        begin, end: where its bytes are, counted from the end of the header.
        cut: which part of which variable it is; None: it is a whole one.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    cut: Cut | None


def write_state(file: BinaryIO, state: State) -> str:
    """Writes the arrays; returns the SHA-256 of what it wrote.

    Raises:
        OSError: a full disk.
        TypeError: an array of Python objects, which only pickle could hold.
    """
    digest = hashlib.sha256()
    for buffer in buffers_of(state, {}):
        for piece in _pieces(buffer):
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
    head = file.read(8)
    text = file.read(header_bytes(head))
    if digest is not None:
        digest.update(head + text)
    entries = read_header(text)
    state = {name: np.empty(entry.shape, entry.dtype) for name, entry in entries.items()}
    for name in in_order(entries):
        for piece in _pieces(bytes_of(state[name])):
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise ValueError(f"'{name}' is cut off")
            if digest is not None:
                digest.update(piece)
    return state, "" if digest is None else digest.hexdigest()


def buffers_of(state: State, cuts: Mapping[str, Cut]) -> list[memoryview]:
    """All bytes of a file, in their order: the header, then the arrays.

    Args:
        cuts: by name, of those arrays that are parts.

    Raises:
        TypeError: an array of Python objects, which only pickle could hold.
    """
    # the largest elements first: so each array begins at a multiple of its elements' size
    placed = sorted(state, key=lambda name: -_itemsize(state[name]))
    header = _header(state, placed, cuts)
    head = memoryview(len(header).to_bytes(8, "little") + header)
    return [head, *(bytes_of(np.require(state[name], requirements="C")) for name in placed)]


def header_bytes(head: bytes) -> int:
    """How long the header is, from the first 8 bytes. Raises ValueError if they are none of such a file."""
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > _MOST_HEADER_BYTES:
        raise ValueError("its header is cut off or has no sensible length")
    return length


def read_header(text: bytes) -> dict[str, Entry]:
    """What a header lists, in its order. Raises ValueError if it is wrong."""
    try:
        header = json.loads(text)
    except ValueError:  # what the parser says of it helps nobody
        raise ValueError("its header is damaged") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    try:
        entries = _entries(header)
        total = sum(entry.end - entry.begin for entry in entries.values())
        if total != max((entry.end for entry in entries.values()), default=0):
            raise ValueError("its header is wrong: there is room between the arrays")
        for entry in entries.values():  # what is too large, or negative, is no damage to stop for later
            np.empty(entry.shape, entry.dtype)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"its header is wrong: {type(error).__name__}: {error}") from None
    return entries


def in_order(entries: Mapping[str, Entry]) -> list[str]:
    """Names of the arrays in the order of their bytes."""
    return sorted(entries, key=lambda name: entries[name].begin)


def bytes_of(array: np.ndarray) -> memoryview:
    """Those of an array without gaps."""
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def _entries(header: dict[str, Any]) -> dict[str, Entry]:
    metadata = header.pop(_METADATA)
    try:
        types, cuts = json.loads(metadata[_TYPES]), json.loads(metadata.get(_CUTS, "{}"))
    except json.JSONDecodeError:
        raise ValueError("its header is damaged") from None
    entries = {}
    for name, facts in header.items():
        shape = tuple(facts["shape"] if name not in types else facts["shape"][:-1])
        dtype = _dtype(types.get(name) or _OF_NAMES[facts["dtype"]])
        begin, end = facts["data_offsets"]
        # checked before memory is taken: a header may claim any size
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"its header is wrong: '{name}' cannot be {facts}")
        entries[name] = Entry(dtype, shape, begin, end, _cut(cuts[name], shape) if name in cuts else None)
    return entries


def _cut(facts: dict[str, Any], part: tuple[int, ...]) -> Cut:
    cut = Cut(facts["of"], tuple(facts["shape"]), tuple(facts["start"]))
    ends = [first + size for first, size in zip(cut.start, part, strict=True)]
    if any(first < 0 or end > size for first, end, size in zip(cut.start, ends, cut.shape, strict=True)):
        raise ValueError(f"its header is wrong: '{cut.of}' has no part {facts}")
    return cut


def _header(state: State, placed: list[str], cuts: Mapping[str, Cut]) -> bytes:
    """Padded with spaces, so that what follows it begins at a multiple of 8 bytes."""
    ends = np.cumsum([state[name].nbytes for name in placed], dtype=np.int64).tolist()
    places = {name: [end - state[name].nbytes, end] for name, end in zip(placed, ends, strict=True)}
    for name, value in state.items():
        if value.dtype.hasobject:
            raise TypeError(f"{name}: got an array of the type {value.dtype}; only plain numbers and texts can be kept")
    types = {name: _type_name(value.dtype) for name, value in state.items() if not _is_known(value.dtype)}
    metadata = {_TYPES: json.dumps(types)}
    if cuts:
        metadata[_CUTS] = json.dumps({name: asdict(cut) for name, cut in cuts.items()})
    facts: dict[str, Any] = {_METADATA: metadata}
    for name, value in state.items():
        assert name != _METADATA
        kind, shape = (
            ("U8", [*value.shape, value.itemsize]) if name in types else (_NAMES[value.dtype.name], value.shape)
        )
        facts[name] = {"dtype": kind, "shape": list(shape), "data_offsets": places[name]}
    text = json.dumps(facts, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), _STREAM_BYTES):
        yield buffer[start : start + _STREAM_BYTES]


def _is_known(dtype: np.dtype) -> bool:
    return dtype.name in _NAMES and dtype.isnative


def _itemsize(array: np.ndarray) -> int:
    # kept as bytes, so they need no alignment
    return array.itemsize if _is_known(array.dtype) else 1


def _type_name(dtype: np.dtype) -> str:
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
