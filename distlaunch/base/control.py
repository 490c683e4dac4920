"""The control channel of a run: a socket in its directory on which its launcher accepts requests.

Only the owner of the directory may connect (mode 0600). A connection carries one request and its answer, each a line of
JSON. It then stays open until the launcher's process has ended, so that the client can wait for that.
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

_MAX_MESSAGE_BYTES = 4096
_MAX_ADDRESS_BYTES = 100
"""Maximum length of a socket's address; the kernel's limit is 107 bytes."""


@contextlib.contextmanager
def address_of(path: Path) -> Generator[str]:
    """Yield an address of the socket that is short enough for the kernel, however long the path is."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # a short path of the same file, through the descriptor of its folder
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Connection:
    """A connection to a run's launcher.

    Raises:
        FileNotFoundError: no launcher accepts requests for the run.
        ConnectionRefusedError: likewise.
        PermissionError: the launcher belongs to another user.
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
        """Send a request to the launcher; return why it is refused, or an empty string if it is accepted.

        Raises:
            TimeoutError: the launcher has not answered in time.
            ConnectionError: the launcher has ended.
        """
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps({"version": VERSION, "request": request}).encode() + b"\n")
        line = read_line(self._socket)
        if not line:
            # end of file: the kernel has closed the launcher's end
            raise ConnectionResetError("the launcher has ended")
        return str(json.loads(line).get("refused", ""))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the launcher's process has ended; return False on timeout."""
        self._socket.settimeout(timeout_s)
        try:
            with contextlib.suppress(ConnectionError):
                # the launcher sends no more data, so `recv` returns at the end of file
                while self._socket.recv(_MAX_MESSAGE_BYTES):
                    pass
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def read_line(connection: socket.socket) -> bytes:
    """Read a line without its line break; return a partial line if the connection is closed or the line is too long."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_MESSAGE_BYTES and (part := connection.recv(_MAX_MESSAGE_BYTES)):
        data += part
    return data.rstrip(b"\n")
