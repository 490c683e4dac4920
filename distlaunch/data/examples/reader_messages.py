"""Messages between a task and its reader processes: pickles, on a socket pair.

Both ends belong to the same user on one host, and no other process has the sockets.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass
from typing import Any

from distlaunch.base.socket_messages import receive_message, send_message


@dataclass(frozen=True)
class Setup:
    """The setup of a reader process.

    Attributes:
        path, argv: of `sys`.
        folders: those of the user's, as of `base.user_modules`.
        files: names under which files of the user's were imported -> the files.
        items: the user's object, pickled: what it needs must be importable first.
        seed: of the run.
    """

    path: list[str]
    argv: list[str]
    folders: list[str]
    files: dict[str, str]
    items: bytes
    seed: int


@dataclass(frozen=True)
class ReadRequest:
    """Read this example, in this pass."""

    number_of_pass: int
    index: int


@dataclass(frozen=True)
class Failed:
    """The reason of a failure, for a message."""

    reason: str


@dataclass(frozen=True)
class Status:
    """Wait for this process, which has ended, and return its exit code, -N for signal N."""

    pid: int


@dataclass(frozen=True)
class Fork:
    """Start one more process; its socket comes with this message, and its number is the answer."""


def send(connection: socket.socket, message: Any, *fds: int) -> None:
    """Send a message. Raise OSError if the other end has closed."""
    send_message(connection, pickle.dumps(message, pickle.HIGHEST_PROTOCOL), fds)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors. Raise EOFError if the other end has closed."""
    data, fds = receive_message(connection, max_fds=1)
    return pickle.loads(data), fds
