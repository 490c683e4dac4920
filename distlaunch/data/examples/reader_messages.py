"""Messages between a task and its reader processes: pickles, on a socket pair.

Unpickling is safe, because both ends belong to the same user on one host, and no other process has the sockets.
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
        path, argv: `sys.path` and `sys.argv` of the task.
        folders: the user's folders; see `base.user_modules`.
        files: the user's imported files, by module name.
        items: the user's object, pickled separately, because it can be loaded only after its modules can be imported.
        seed: the run's seed.
    """

    path: list[str]
    argv: list[str]
    folders: list[str]
    files: dict[str, str]
    items: bytes
    seed: int


@dataclass(frozen=True)
class ReadRequest:
    """Request to read an example in a pass."""

    number_of_pass: int
    index: int


@dataclass(frozen=True)
class Failed:
    """Answer with the reason of a failure."""

    reason: str


@dataclass(frozen=True)
class Status:
    """Request to reap a reader process that has ended (`waitpid`); the answer is its exit code, -N for signal N."""

    pid: int


@dataclass(frozen=True)
class Fork:
    """Request to start another reader process with the socket in this message; the answer is its process id."""


def send(connection: socket.socket, message: Any, *fds: int) -> None:
    """Send a message. Raise OSError if the other end has closed."""
    send_message(connection, pickle.dumps(message, pickle.HIGHEST_PROTOCOL), fds)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors. Raise EOFError if the other end has closed."""
    data, fds = receive_message(connection, max_fds=1)
    return pickle.loads(data), fds
