"""The control channel of a run: a socket in its directory through which its controller takes requests.

Only the owner of the directory may connect (mode 0600). A connection is one request: a line of JSON, answered by a line
of JSON. It then stays open until the controller's process has ended, so the client can wait for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Literal, get_args

VERSION = 1
Request = Literal["stop", "stop-now", "stacks"]
REQUESTS: tuple[Request, ...] = get_args(Request)

_LONGEST = 4096  # of a request and of an answer, in bytes
_LONGEST_PATH = 100
"""Bytes of a socket's address; the kernel takes 107."""


@contextlib.contextmanager
def address_of(path: Path) -> Generator[str]:
    """Yield an address of the socket that is short enough for the kernel, for any run directory."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # through the open folder: short, and the same file
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Connection:
    """A connection to a run's controller.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody takes requests for the run.
        PermissionError: it belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with address_of(path) as address:
                self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise

    def ask(self, request: Request, timeout_s: float | None) -> str:
        """Send a request to the controller; return its objection, or an empty string if it agreed.

        Raises:
            TimeoutError: the controller has not answered in time.
            ConnectionError: the controller has ended.
        """
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps({"version": VERSION, "request": request}).encode() + b"\n")
        line = read_line(self._socket)
        if not line:
            # end of file: the kernel has closed its end
            raise ConnectionResetError("the controller has ended")
        return str(json.loads(line).get("refused", ""))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the controller's process has ended; return False on timeout."""
        self._socket.settimeout(timeout_s)
        try:
            with contextlib.suppress(ConnectionError):
                # the controller sends nothing more: what comes is the end of file
                while self._socket.recv(_LONGEST):
                    pass
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def read_line(connection: socket.socket) -> bytes:
    """Read a line without its line break; return a partial line if the other side closes or it gets too long."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST and (part := connection.recv(_LONGEST)):
        data += part
    return data.rstrip(b"\n")
