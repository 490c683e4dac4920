"""The state of a checkpoint on disk: one file, or one for each process that has written the parts it holds."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
from pydantic import Field

from distlaunch.base.regular_files import open_regular
from distlaunch.strategies.state.file_pieces import Buffers, pass_pieces, pieces_of, read_pieces, write_pieces
from distlaunch.strategies.state.pace import FULL_SPEED, Pace
from distlaunch.strategies.state.state_files import (
    Cut,
    Entry,
    buffers_of,
    bytes_of,
    header_bytes,
    in_order,
    read_header,
)

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State

_DIGEST_CHARS = 64
Shapes = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Type and shape of each array, by name."""
NeededBlocks = Mapping[str, Sequence[tuple[slice, ...]]]
"""Which blocks of variables a process needs; it needs the whole of others."""


class FileDamagedError(ValueError):
    """A file is not as it was written."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


@dataclass(frozen=True)
class StateFile:
    """What a checkpoint records of one of its files.

    Attributes:
        digests: SHA-256 of each piece, in hexadecimal digits, one after the other.
    """

    # a bare name: a checkpoint that was given to somebody must lead nowhere else
    name: Annotated[str, Field(pattern=r"\A[A-Za-z0-9][\w.-]*\z")]
    num_bytes: Annotated[int, Field(ge=0, strict=True)]
    digests: Annotated[str, Field(pattern=r"\A[0-9a-f]*\z")]


def write_file(folder: Path, name: str, state: State, cuts: Mapping[str, Cut], pace: Pace = FULL_SPEED) -> StateFile:
    """Writes a file, and waits until the disk has it. Raises OSError: a full disk."""
    buffers = Buffers(buffers_of(state, cuts))
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        digests = write_pieces(fd, buffers, pace)
        os.fsync(fd)
    finally:
        os.close(fd)
    return StateFile(name, buffers.num_bytes, b"".join(digests).hex())


def read_files(
    folder: Path,
    files: Sequence[StateFile],
    needed: NeededBlocks | None = None,
    allocate: Callable[[Shapes], State] | None = None,
) -> State:
    """The variables that some files hold, put together, and verified as far as they are read.

    Args:
        needed: blocks that are needed; what lies beside them may be zero.
        allocate: makes the arrays.

    Raises:
        FileDamagedError: a file is not what was written, or a part of a variable is missing.
        OSError: a file is missing, or the disk does not give it out.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_OpenFile(folder, facts)) for facts in files]
        shapes = _shapes(opened)
        make = allocate or (_zeros if needed is not None else _empty)
        state = make(shapes)
        for file in opened:
            file.read_into(state, needed)
        return state


def open_whole(folder: Path, facts: StateFile) -> int | None:
    """A descriptor of a file that is the whole state, verified; None: it holds parts of variables.

    Raises FileDamagedError and OSError as `read_files` does.
    """
    with _OpenFile(folder, facts) as file:
        return file.verified() if file.is_whole else None


def copy_whole(folder: Path, facts: StateFile, target: int) -> bool:
    """Copies such a file to another descriptor, and verifies it; False: it holds parts of variables."""
    with _OpenFile(folder, facts) as file:
        if file.is_whole:
            file.copy_to(target)
        return file.is_whole


class _OpenFile:
    """A file whose header has been read, but not yet verified."""

    def __init__(self, folder: Path, facts: StateFile) -> None:
        self._file_facts, self.name = facts, facts.name
        self._file = open_regular(folder / facts.name, buffering=0)
        self._fd = self._file.fileno()
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        facts = self._file_facts
        found = os.fstat(self._fd).st_size
        if found != facts.num_bytes:
            raise FileDamagedError(facts.name, f"it has {found:,} bytes, and {facts.num_bytes:,} were written")
        try:
            head = os.pread(self._fd, 8, 0)
            text = os.pread(self._fd, header_bytes(head), 8)
            self._header = bytearray(head + text)
            self.entries = read_header(text)
        except ValueError as error:
            raise FileDamagedError(facts.name, str(error)) from None
        data = sum(entry.end - entry.begin for entry in self.entries.values())
        if len(self._header) + data != facts.num_bytes or len(facts.digests) != _DIGEST_CHARS * len(
            pieces_of(0, facts.num_bytes)
        ):
            raise FileDamagedError(facts.name, "its header is wrong: it gives another size")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_whole(self) -> bool:
        """Whether it has no parts of variables."""
        return all(entry.cut is None for entry in self.entries.values())

    def read_into(self, state: State, needed: NeededBlocks | None) -> None:
        """Reads the arrays to where they belong."""
        buffers, copies = [memoryview(self._header)], []
        for name in in_order(self.entries):
            entry = self.entries[name]
            target = state[name] if entry.cut is None else state[entry.cut.of][entry.cut.within(entry.shape)]
            if target.flags.c_contiguous:
                buffers.append(bytes_of(target))
            else:
                part = np.zeros(entry.shape, entry.dtype)  # not all of it may be read
                copies.append((target, part))
                buffers.append(bytes_of(part))
        numbers = None if needed is None else self._needed_pieces(needed)
        self._verified(lambda: read_pieces(self._fd, Buffers(buffers), numbers))
        for target, part in copies:
            target[...] = part

    def verified(self) -> int:
        """One more descriptor of the file, which has been read to its end."""
        self.copy_to(None)
        return os.dup(self._fd)

    def copy_to(self, target: int | None) -> None:
        """Reads the whole file, and copies it to another descriptor if there is one."""
        self._verified(lambda: dict(enumerate(pass_pieces(self._fd, self._file_facts.num_bytes, target))))

    def _verified(self, read: Callable[[], Mapping[int, bytes]]) -> None:
        """Reads, and compares the checksums of the pieces."""
        try:
            digests = read()
        except EOFError:
            raise FileDamagedError(self.name, "it is cut off") from None
        for number, digest in digests.items():
            if digest.hex() != self._file_facts.digests[_DIGEST_CHARS * number : _DIGEST_CHARS * (number + 1)]:
                raise FileDamagedError(self.name, "its content does not match its checksum")

    def _needed_pieces(self, needed: NeededBlocks) -> Collection[int]:
        numbers = set(pieces_of(0, len(self._header)))
        for name, entry in self.entries.items():
            of = name if entry.cut is None else entry.cut.of
            start = len(self._header) + entry.begin
            for first, stop in _needed_bytes(entry, needed.get(of)):
                numbers.update(pieces_of(start + first, start + stop))
        return numbers


def _needed_bytes(entry: Entry, blocks: Sequence[tuple[slice, ...]] | None) -> list[tuple[int, int]]:
    """Where in an array the bytes of blocks of its variable lie, from the first to the last of each."""
    size = entry.end - entry.begin
    if blocks is None or not entry.shape:
        return [(0, size)]
    if not size:
        return []
    begins = entry.cut.start if entry.cut is not None else (0,) * len(entry.shape)
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
    """Type and shape of each variable in some files.

    Raises:
        FileDamagedError: no file has a part of it, or two have the same.
    """
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    missing: dict[str, int] = {}
    last = ""
    for file in files:
        last = file.name
        for name, entry in file.entries.items():
            of, shape = (name, entry.shape) if entry.cut is None else (entry.cut.of, entry.cut.shape)
            if shapes.setdefault(of, (entry.dtype, shape)) != (entry.dtype, shape):
                raise FileDamagedError(file.name, f"its part of '{of}' does not fit those of other files")
            missing[of] = missing.get(of, math.prod(shape)) - math.prod(entry.shape)
    for name, number in missing.items():
        if number:
            raise FileDamagedError(last, f"parts of '{name}' are missing in the files, or there twice")
    return shapes


def _empty(shapes: Shapes) -> State:
    return {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}


def _zeros(shapes: Shapes) -> State:
    """Memory that nobody writes to is not taken."""
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
