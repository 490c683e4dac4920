"""A state that other processes of this host can map, so that one of them reads and verifies it for all."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from distlaunch.base.local_disks import is_local_disk
from distlaunch.strategies.state.state_files import buffers_of, header_bytes, in_order, read_header
from distlaunch.training.checkpoints.state_set import Shapes, StateFile, copy_whole, open_whole, read_files

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State


@dataclass(frozen=True)
class MemoryName:
    """How another process of this host finds it.

    Attributes:
        path: of the open file, below /proc.
        identity: what no other file has, in case that the path leads to another in a container.
    """

    path: str
    identity: tuple[int, ...]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Self:
        path, identity = plain
        return cls(path, tuple(identity))

    def to_plain(self) -> list[Any]:
        return [self.path, list(self.identity)]


class SharedMemory:
    """Holds a state until it is closed; arrays of it stay.

    What a process changes in its arrays, no other sees. The memory holds a header and the arrays, as a file does. It is
    that file itself, in the system's cache, where that is on a disk of this host.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    @staticmethod
    def is_possible() -> bool:
        return hasattr(os, "memfd_create")

    def fill(self, folder: Path, files: Sequence[StateFile]) -> None:
        """Takes the state that some files hold. Raises as `read_files` does."""
        assert self._fd is None, "once"
        if len(files) == 1 and is_local_disk(folder):
            # nobody writes to a file of a checkpoint, and one that is deleted stays for those who have it open
            self._fd = open_whole(folder, files[0])
        if self._fd is None:
            self._fd = os.memfd_create("distlaunch-state")
            if len(files) != 1 or not copy_whole(folder, files[0], self._fd):
                read_files(folder, files, allocate=self._allocate)

    def _allocate(self, shapes: Shapes) -> State:
        """Arrays that are to be filled."""
        assert self._fd is not None
        head, *arrays = buffers_of({name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}, {})
        os.ftruncate(self._fd, len(head) + sum(map(len, arrays)))
        os.pwrite(self._fd, head, 0)
        return _arrays(mmap.mmap(self._fd, 0))

    def filled(self) -> State:
        """The arrays, of this process alone."""
        assert self._fd is not None
        return _arrays(_private(self._fd))

    @property
    def name(self) -> MemoryName:
        assert self._fd is not None
        return MemoryName(f"/proc/{os.getpid()}/fd/{self._fd}", _identity(self._fd))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_memory(name: MemoryName) -> State | None:
    """The state that another process holds; None if it cannot be had from there."""
    with contextlib.suppress(OSError, ValueError), Path(name.path).open("rb") as file:
        if _identity(file.fileno()) == name.identity:
            return _arrays(_private(file.fileno()))
    return None


def _private(fd: int) -> mmap.mmap:
    """With what other processes write from now on neither seen nor changed."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _arrays(memory: mmap.mmap) -> State:
    length = header_bytes(memory[:8])
    entries = read_header(memory[8 : 8 + length])
    found = {}
    for name in in_order(entries):
        entry = entries[name]
        flat = np.frombuffer(memory, np.uint8, entry.end - entry.begin, 8 + length + entry.begin)
        found[name] = flat.view(entry.dtype).reshape(entry.shape)
    return {name: found[name] for name in entries}


def _identity(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size
