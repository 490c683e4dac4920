"""Messages with descriptors on a Unix socket between two processes: the length, then the bytes.

This module imports only a few modules of the standard library, because processes that fork import it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_LENGTH = struct.Struct("!Q")


def send_message(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message with copies of descriptors. Raise OSError if the other end has closed."""
    # descriptors travel with the first bytes
    head = _LENGTH.pack(len(data))
    if fds:
        socket.send_fds(connection, [head], list(fds))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive_message(connection: socket.socket, max_fds: int = 0) -> tuple[bytearray, list[int]]:
    """Return the next message and the descriptors that came with it.

    Raises:
        EOFError: the other end has closed.
        OSError: the connection failed, or its timeout has passed.
    """
    try:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, max_fds)
        if len(head) < _LENGTH.size:
            raise EOFError
        data = bytearray(_LENGTH.unpack(head)[0])
        view = memoryview(data)
        while view:
            number = connection.recv_into(view)
            if not number:
                raise EOFError
            view = view[number:]
    except ConnectionError:
        raise EOFError from None
    return data, list(fds)
