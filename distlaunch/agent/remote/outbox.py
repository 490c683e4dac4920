"""The messages to be written to a connection. Writing never blocks, and files are sent after all other messages."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator

_LOW_BYTES = 512 * 1024
"""Files are read only while fewer bytes are waiting, so that a slow network costs no memory and delays no heartbeat."""
_WRITE_BYTES = 64 * 1024


class Outbox:
    """A queue of messages, followed by files, for a descriptor that does not block."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._waiting: deque[memoryview] = deque()
        self._files: deque[Iterator[bytes]] = deque()
        self._size = 0

    @property
    def has_room(self) -> bool:
        """Return True if few bytes are waiting, so that less urgent messages may be added."""
        return self._size < _LOW_BYTES

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting or self._files)

    def put(self, message: bytes) -> None:
        """Queue a message in front of all waiting files."""
        self._waiting.append(memoryview(message))
        self._size += len(message)

    def put_files(self, messages: Iterable[bytes]) -> None:
        """Queue messages that are produced when there is room. If producing one raises OSError, drop the rest."""
        self._files.append(iter(messages))

    def flush(self) -> None:
        """Write as much as the other side accepts now. Raise OSError if the connection is closed."""
        self._fill()
        while self._waiting:
            first = self._waiting[0]
            try:
                written = os.write(self._fd, first[:_WRITE_BYTES])
            except BlockingIOError:
                return
            self._size -= written
            if written == len(first):
                self._waiting.popleft()
            else:
                self._waiting[0] = first[written:]
            self._fill()

    def _fill(self) -> None:
        while self._files and self.has_room:
            try:
                message = next(self._files[0], None)
            # a file was deleted in the meantime, or cannot be read
            except OSError:
                message = None
            if message is None:
                self._files.popleft()
            else:
                self.put(message)
