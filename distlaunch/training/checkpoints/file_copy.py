"""The file of a checkpoint, as several processes see it."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from distlaunch.strategies.state_files import read_state

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State


Identity = tuple[str | int, ...]


@dataclass(frozen=True)
class FileCopy:
    """A file with a state that one process has verified. It tells others, who may be able to read it themselves.

    Attributes:
        sha256: of its content.
        identity: what this file has for every process of the same host, and no other file.
    """

    path: str
    sha256: str
    identity: Identity

    @classmethod
    def of(cls, file: BinaryIO, sha256: str) -> Self:
        """An open file that has just been verified."""
        # absolute: another process may have another working directory
        return cls(os.path.abspath(file.name), sha256, _identity(file))

    def to_plain(self) -> list[Any]:
        return [self.path, self.sha256, *self.identity]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Self:
        path, sha256, *identity = plain
        return cls(path, sha256, tuple(identity))

    def read(self, ahead: Ahead | None = None) -> State | None:
        """The state in it; None if this process cannot have it from there.

        Checksummed again unless it is the very file that was verified, on the same host.

        Args:
            ahead: what this process has read already, perhaps of this file.
        """
        if ahead is not None and ahead.identity == self.identity:
            return ahead.state
        try:
            with open(self.path, "rb") as file:
                same = _identity(file) == self.identity
                state, sha256 = read_state(file, checksum=not same)
                return state if same or sha256 == self.sha256 else None
        # no shared disk, or its view of the file is an older one: the state comes from the chief
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class Ahead:
    """The state in a file that nobody has verified yet."""

    identity: Identity
    state: State


def read_ahead(path: Path) -> Ahead | None:
    """Reads what will be wanted, if it turns out to be good; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return Ahead(_identity(file), read_state(file, checksum=False)[0])
    except (OSError, ValueError):
        return None


def _identity(file: BinaryIO) -> Identity:
    status = os.fstat(file.fileno())
    # numbers of devices and files mean something on one kernel only; size and time tell a file that was written anew
    return _host(), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _host() -> str:
    """What no other host has, and all containers of it have, as they have the kernel's device numbers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {uuid.getnode()}"
