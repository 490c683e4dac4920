"""Indices of files in the user's cache, built once and then mapped into memory by all processes of a host.

A cached index is a file with several arrays in NumPy's format. The first one contains JSON that describes the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distlaunch.base.cache_dir import cache_directory
from distlaunch.data.files.listing import FileSet

_VERSION = 1  # version of the file format
_CHECKED_AT_ONCE = 16 << 20  # bytes per call of `zlib.crc32`, which releases the interpreter's lock meanwhile
_KEPT_UNUSED_S = 90 * 24 * 3_600  # 90 days


@dataclass(frozen=True)
class Index:
    """The positions of the records of some files.

    Attributes:
        arrays: the positions, in arrays whose names depend on the format.
        facts: further facts about the files, as JSON types.
    """

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)


def cached_index(files: FileSet, kind: str, version: int, build: Callable[[], Index]) -> Index:
    """Return the index of the files, from the cache if it is up to date.

    Args:
        kind: name of the format, which is part of the cached file's name.
        version: version of `build`; cached indices of other versions are not used.
        build: reads the files and returns the index.
    """
    directory = cache_directory("indices")
    if directory is None:
        return build()
    # a file that was changed has another size or time
    key = _hash((_VERSION, version, kind, files.paths, files.sizes, files.modified_ns))
    path = directory / f"{kind}-{key[:24]}.index"
    known = _load(path, key)
    if known is not None:
        return known
    index = build()
    try:
        _save(path, key, index)
    except OSError as error:
        warnings.warn(
            f"the index of {len(files.paths):,} files cannot be cached in {directory} ({error.strerror or error}), so "
            "each process builds its own; set XDG_CACHE_HOME to a writable directory with free space",
            stacklevel=2,
        )
        return index
    _remove_unused(directory)
    return _load(path, key) or index  # mapped, so that processes share its memory


def _remove_unused(directory: Path) -> None:
    """Remove indices that no process has used for a long time."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_UNUSED_S:
                path.unlink()


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogateescape")).hexdigest()


def _save(path: Path, key: str, index: Index) -> None:
    checksum = {name: _checksum(array) for name, array in index.arrays.items()}
    header = json.dumps({"key": key, "facts": index.facts, "checksum": checksum}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            for array in (np.frombuffer(header, np.uint8), *index.arrays.values()):
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        # several processes may write the same index, so each replaces the file as a whole
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _load(path: Path, key: str) -> Index | None:
    """Return the cached index, or None if it is missing, outdated or damaged."""
    try:
        with path.open("rb") as file:
            header = json.loads(_map_array(file).tobytes())
            # compared in full, because the file's name has only 24 digits of the key
            if header["key"] != key:
                return None
            arrays = {name: _map_array(file) for name in header["checksum"]}
            if file.read(1) or any(_checksum(arrays[name]) != known for name, known in header["checksum"].items()):
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # marks the file as used
            return Index(arrays, header["facts"])
    # NumPy and JSON raise these for damaged files
    except (OSError, ValueError, KeyError, TypeError, EOFError, OverflowError, SyntaxError):
        return None


def _map_array(file: BinaryIO) -> np.ndarray:
    """Map the array at the file's position, and move the position to the end of the array."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"got version {version} of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("got objects")
    start = file.tell()
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if start + num_bytes > os.fstat(file.fileno()).st_size:
        raise ValueError("the file is too short")
    array = np.memmap(file, dtype, "r", start, shape) if num_bytes else np.empty(shape, dtype)
    file.seek(start + num_bytes)  # at the end, because mapping moves the position too
    return array


def _checksum(array: np.ndarray) -> int:
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    checksum = 0
    for start in range(0, len(data), _CHECKED_AT_ONCE):
        checksum = zlib.crc32(data[start : start + _CHECKED_AT_ONCE], checksum)
    return checksum
