"""The state of a checkpoint for processes that did not choose it: in shared memory of this host, or on the disk."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from distlaunch.training.checkpoints.shared_memory import MemoryName, read_memory
from distlaunch.training.checkpoints.state_set import NeededBlocks, StateFile, read_files

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State


@dataclass(frozen=True)
class FileCopy:
    """Where others may find a state that one process has verified.

    Attributes:
        host: where that process is.
        memory: the state in its memory; None: it is not to be had there.
    """

    folder: str
    files: tuple[StateFile, ...]
    host: str
    memory: MemoryName | None

    @classmethod
    def of(cls, folder: Path, files: Sequence[StateFile], memory: MemoryName | None) -> Self:
        """What this process has verified."""
        return cls(os.path.abspath(folder), tuple(files), this_host(), memory)

    def to_plain(self) -> dict[str, Any]:
        memory = self.memory.to_plain() if self.memory is not None else None
        return {
            "folder": self.folder,
            "files": [asdict(file) for file in self.files],
            "host": self.host,
            "memory": memory,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        memory = MemoryName.from_plain(plain["memory"]) if plain["memory"] is not None else None
        return cls(plain["folder"], tuple(StateFile(**file) for file in plain["files"]), plain["host"], memory)

    def read(self, needed: NeededBlocks | None = None) -> State | None:
        """The state; None if this process cannot have it from there. What it reads from the disk, it verifies.

        Args:
            needed: blocks of variables that it needs; what lies beside them may be zero.
        """
        if self.memory is not None and self.host == this_host():
            state = read_memory(self.memory)
            if state is not None:
                return state
        if self.files:
            with contextlib.suppress(OSError, ValueError):
                return read_files(Path(self.folder), self.files, needed)
        return None


@functools.cache
def this_host() -> str:
    """What no other host has, and all containers of it have, as they have the kernel's device numbers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {uuid.getnode()}"
