"""Writes and reads the files of a state: one file, or one for each process that has written its shards.

A file is written and read in pieces, several at the same time, and each piece has a checksum. Threads copy directly
between the file and the arrays, so no further memory is needed. A process that needs a part of a file reads and
verifies only the pieces that contain it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self

import numpy as np
from pydantic import Field

from distlaunch.base.regular_files import open_regular
from distlaunch.checkpoints.format import Entry, buffers_of, bytes_of, header_bytes, names_by_position, read_header
from distlaunch.checkpoints.throttle import FULL_SPEED, Throttle
from distlaunch.cluster.cores import num_visible_cores
from distlaunch.strategies.state import ShardSlice, State

PIECE_BYTES = 4 << 20
"""Size of a piece; large, so that threads seldom take the interpreter's lock.

A thread of low priority may wait for a core while it holds the lock, and training would wait with it.
"""
_COPIED_BYTES = 256 << 10  # size of a copy buffer, which fits into a core's cache
_MAX_BUFFERS = 512  # largest number of buffers for a system call
_MAX_THREADS = 8
_DIGEST_CHARS = 64
Shapes = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Type and shape of each array, by name."""
NeededBlocks = Mapping[str, Sequence[tuple[slice, ...]]]
"""Blocks of variables that a process needs, by name; it needs other variables as a whole."""


class FileDamagedError(ValueError):
    """The content of a file has changed since it was written."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


@dataclass(frozen=True)
class StateFile:
    """A file of a checkpoint, as `meta.json` lists it.

    Attributes:
        name: name of the file within the checkpoint.
        num_bytes: size of the file.
        digests: concatenated SHA-256 of the pieces, in hexadecimal digits.
    """

    # without folders, so that a checkpoint from another person cannot lead to other files
    name: Annotated[str, Field(pattern=r"\A[A-Za-z0-9][\w.-]*\z")]
    num_bytes: Annotated[int, Field(ge=0, strict=True)]
    digests: Annotated[str, Field(pattern=r"\A[0-9a-f]*\z")]


class Bytes(Protocol):
    """Access to the bytes of a local or remote file, from any thread."""

    def size(self) -> int: ...

    def read_into(self, buffers: list[memoryview], offset: int) -> int:
        """Fill the buffers, or a part of them, from an offset, and return the number of bytes, 0 at the end.

        Raises:
            OSError: the disk cannot be read, or the connection is lost.
        """
        ...

    def close(self) -> None: ...


class DiskFile:
    """Implementation of `Bytes` for a file on disk, which remains readable if it is deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path, buffering=0)

    def fileno(self) -> int:
        return self._file.fileno()

    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def read_into(self, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(self.fileno(), buffers, offset)

    def close(self) -> None:
        self._file.close()


def write_file(
    folder: Path, name: str, state: State, slices: Mapping[str, ShardSlice], throttle: Throttle = FULL_SPEED
) -> StateFile:
    """Write a file, and wait until it is on the disk.

    Raises:
        OSError: the file cannot be written, for instance because the disk is full.
    """
    buffers = _Buffers(buffers_of(state, slices))
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(number: int) -> bytes:
        digest = hashlib.sha256()
        with throttle.piece():
            for at, views in buffers.groups(number):
                for view in views:
                    digest.update(view)
                _process_all(lambda views, at: os.pwritev(fd, views, at), views, at)
        return digest.digest()

    try:
        # half of the cores, because steps continue meanwhile and need memory bandwidth and cores
        digests = _in_threads(write, _pieces_of(0, buffers.num_bytes), max(num_visible_cores() // 2, 1))
        os.fsync(fd)
    finally:
        os.close(fd)
    return StateFile(name, buffers.num_bytes, b"".join(digests).hex())


def read_files(folder: Path, files: Sequence[StateFile], needed: NeededBlocks | None = None) -> State:
    """Return the state in the files of a folder, see `StateFiles.read`."""
    with StateFiles.on_disk(folder, files) as opened:
        return opened.read(needed)


def read_bytes(content: Bytes, num_bytes: int, offset: int = 0) -> bytes:
    """Return some bytes of a file.

    Raises:
        EOFError: the file ends earlier.
    """
    data = bytearray(num_bytes)
    _process_all(content.read_into, [memoryview(data)], offset)
    return bytes(data)


class StateFiles:
    """Open files of one state, whose headers have been read but not yet verified.

    Args:
        contents: functions that open the files, in order.

    Raises:
        FileDamagedError: a file has changed since it was written.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Sequence[StateFile], contents: Iterable[Callable[[], Bytes]]) -> None:
        self._stack = contextlib.ExitStack()
        self.contents: list[Bytes] = []
        self._files: list[_OpenFile] = []
        with contextlib.ExitStack() as opening:
            opening.callback(self.close)
            for facts, opened in zip(files, contents, strict=True):
                self.contents.append(opened())
                self._stack.callback(self.contents[-1].close)
                self._files.append(_OpenFile(facts, self.contents[-1]))
            opening.pop_all()

    @classmethod
    def on_disk(cls, folder: Path, files: Sequence[StateFile]) -> Self:
        """Open the files of a folder."""
        return cls(files, [lambda path=folder / each.name: DiskFile(path) for each in files])

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_one(self) -> bool:
        """True if the state is one file of whole variables."""
        return len(self._files) == 1 and self._files[0].is_whole

    def read(self, needed: NeededBlocks | None = None, allocate: Callable[[Shapes], State] | None = None) -> State:
        """Return the state; all parts that are read are verified.

        Args:
            needed: blocks that are needed; other values may be zero.
            allocate: creates the arrays.

        Raises:
            FileDamagedError: a file has changed since it was written, or a shard of a variable is missing.
            OSError: a file cannot be read.
        """
        make = allocate or (_zeros if needed is not None else _empty)
        state = make(_shapes(self._files))
        for file in self._files:
            file.read_into(state, needed)
        return state

    def verify(self, copy_to: int | None = None) -> None:
        """Verify a state of one file, through small buffers, and optionally copy the file.

        Copying to a descriptor is faster than reading into a memory mapping, in which each page causes a fault.

        Args:
            copy_to: the descriptor to which the file is copied; None for no copy.

        Raises:
            FileDamagedError, OSError: see `read`.
        """
        assert self.is_one
        self._files[0].copy_to(copy_to)


class _OpenFile:
    """A file whose header has been read, but not yet verified."""

    def __init__(self, facts: StateFile, content: Bytes) -> None:
        self._facts, self.name, self._content = facts, facts.name, content
        found = content.size()
        if found != facts.num_bytes:
            raise FileDamagedError(facts.name, f"it has {found:,} bytes, but {facts.num_bytes:,} were written")
        try:
            head = read_bytes(content, min(8, found))
            text = read_bytes(content, min(header_bytes(head), found - 8), 8)
            self._header = bytearray(head + text)
            self.entries = read_header(text)
        except EOFError:
            raise FileDamagedError(facts.name, "it is truncated") from None
        except ValueError as error:
            raise FileDamagedError(facts.name, str(error)) from None
        data = sum(entry.end - entry.begin for entry in self.entries.values())
        if len(self._header) + data != facts.num_bytes or len(facts.digests) != _DIGEST_CHARS * len(
            _pieces_of(0, facts.num_bytes)
        ):
            raise FileDamagedError(facts.name, "its header is wrong: the sizes do not match")

    @property
    def is_whole(self) -> bool:
        """True if the file contains no shards of variables."""
        return all(entry.shard is None for entry in self.entries.values())

    def read_into(self, state: State, needed: NeededBlocks | None) -> None:
        """Read the arrays into their buffers."""
        views, copies = [memoryview(self._header)], []
        for name in names_by_position(self.entries):
            entry = self.entries[name]
            target = state[name] if entry.shard is None else state[entry.shard.of][entry.shard.within(entry.shape)]
            if target.flags.c_contiguous:
                views.append(bytes_of(target))
            else:
                part = np.zeros(entry.shape, entry.dtype)  # zeros, because only a part of it may be read
                copies.append((target, part))
                views.append(bytes_of(part))
        buffers = _Buffers(views)

        def read(number: int) -> bytes:
            digest = hashlib.sha256()
            for at, views in buffers.groups(number):
                _process_all(self._content.read_into, views, at)
                for view in views:
                    digest.update(view)
            return digest.digest()

        pieces = _pieces_of(0, buffers.num_bytes) if needed is None else sorted(self._needed_pieces(needed))
        self._verified(read, pieces)
        for target, part in copies:
            target[...] = part

    def copy_to(self, target: int | None) -> None:
        """Read the whole file, and copy it to a descriptor if there is one."""
        num_bytes = self._facts.num_bytes

        def write(views: list[memoryview], at: int) -> int:
            assert target is not None
            return os.pwritev(target, views, at)

        def take(number: int) -> bytes:
            digest, buffer = hashlib.sha256(), memoryview(bytearray(_COPIED_BYTES))
            stop = min((number + 1) * PIECE_BYTES, num_bytes)
            for at in range(number * PIECE_BYTES, stop, _COPIED_BYTES):
                view = buffer[: stop - at]
                _process_all(self._content.read_into, [view], at)
                digest.update(view)
                if target is not None:
                    _process_all(write, [view], at)
            return digest.digest()

        self._verified(take, _pieces_of(0, num_bytes))

    def _verified(self, read: Callable[[int], bytes], pieces: Sequence[int]) -> None:
        """Read pieces, and compare their checksums."""
        try:
            digests = _in_threads(read, pieces, num_visible_cores())
        except EOFError:
            raise FileDamagedError(self.name, "it is truncated") from None
        for number, digest in zip(pieces, digests, strict=True):
            if digest.hex() != self._facts.digests[_DIGEST_CHARS * number : _DIGEST_CHARS * (number + 1)]:
                raise FileDamagedError(self.name, "its content does not match its checksum")

    def _needed_pieces(self, needed: NeededBlocks) -> Collection[int]:
        numbers = set(_pieces_of(0, len(self._header)))
        for name, entry in self.entries.items():
            of = name if entry.shard is None else entry.shard.of
            start = len(self._header) + entry.begin
            for first, stop in _needed_bytes(entry, needed.get(of)):
                numbers.update(_pieces_of(start + first, start + stop))
        return numbers


def _needed_bytes(entry: Entry, blocks: Sequence[tuple[slice, ...]] | None) -> list[tuple[int, int]]:
    """Return, for each needed block of a variable, the range of the array's bytes that contains the block."""
    size = entry.end - entry.begin
    if blocks is None or not entry.shape:
        return [(0, size)]
    if not size:
        return []
    begins = entry.shard.start if entry.shard is not None else (0,) * len(entry.shape)
    found = []
    for block in blocks:
        firsts = [max(one.start - begin, 0) for one, begin in zip(block, begins, strict=True)]
        lasts = [min(one.stop - b, n) - 1 for one, b, n in zip(block, begins, entry.shape, strict=True)]
        if all(first <= last for first, last in zip(firsts, lasts, strict=True)):
            low = int(np.ravel_multi_index(firsts, entry.shape)) * entry.dtype.itemsize
            high = (int(np.ravel_multi_index(lasts, entry.shape)) + 1) * entry.dtype.itemsize
            found.append((low, high))
    return found


def _shapes(files: Sequence[_OpenFile]) -> Shapes:
    """Return type and shape of each variable in some files.

    Raises:
        FileDamagedError: a shard of a variable is missing, or is in two files.
    """
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    missing: dict[str, int] = {}
    last = ""
    for file in files:
        last = file.name
        for name, entry in file.entries.items():
            of, shape = (name, entry.shape) if entry.shard is None else (entry.shard.of, entry.shard.shape)
            if shapes.setdefault(of, (entry.dtype, shape)) != (entry.dtype, shape):
                raise FileDamagedError(file.name, f"its part of '{of}' does not match the parts in other files")
            missing[of] = missing.get(of, math.prod(shape)) - math.prod(entry.shape)
    for name, number in missing.items():
        if number:
            raise FileDamagedError(last, f"parts of '{name}' are missing, or stored twice")
    return shapes


def _empty(shapes: Shapes) -> State:
    return {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}


def _zeros(shapes: Shapes) -> State:
    """Return arrays of zeros, which use no memory until they are written to."""
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}


class _Buffers:
    """Buffers that together contain the bytes of a file."""

    def __init__(self, buffers: Iterable[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._starts = list(itertools.accumulate(map(len, self._buffers), initial=0))
        self.num_bytes = self._starts[-1]

    def groups(self, number: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield the buffers of a piece in groups that fit into a system call, each with its offset in the file."""
        at = number * PIECE_BYTES
        views = list(self._between(at, min(at + PIECE_BYTES, self.num_bytes)))
        for first in range(0, len(views), _MAX_BUFFERS):
            some = views[first : first + _MAX_BUFFERS]
            yield at, some
            at += sum(map(len, some))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[index]
            view = self._buffers[index][start - first : stop - first]
            yield view
            start += len(view)
            index += 1


def _pieces_of(start: int, stop: int) -> range:
    """Return the numbers of the pieces that contain a range of bytes."""
    return range(start // PIECE_BYTES, -(-stop // PIECE_BYTES))


def _process_all(call: Callable[[list[memoryview], int], int], views: list[memoryview], offset: int) -> None:
    """Repeat a call that may process only some bytes until all bytes are processed.

    Raises:
        EOFError: the file ends earlier.
    """
    while views:
        done = call(views, offset)
        if not done:
            raise EOFError
        offset += done
        while views and done >= len(views[0]):
            done -= len(views[0])
            views = views[1:]
        if done:
            views = [views[0][done:], *views[1:]]


def _in_threads(action: Callable[[int], bytes], numbers: Sequence[int], most: int) -> list[bytes]:
    threads = min(most, len(numbers), _MAX_THREADS)
    if threads < 2:
        return [action(number) for number in numbers]
    pool = ThreadPoolExecutor(threads, "pieces")  # threads have the priority of the thread that starts them
    try:
        return list(pool.map(action, numbers))
    finally:
        pool.shutdown(cancel_futures=True)
