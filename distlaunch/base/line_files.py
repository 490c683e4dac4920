"""Files to which many append lines."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from distlaunch.base.folders import make_folder


class LineWriter:
    """Appends lines to one file, each with a single `write`, so that readers never see half of an earlier line.

    Threads may share it. A disk that is full stops nobody: lines wait in memory, and are written with the first that
    can be.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        # appending: each write goes to the end, whatever other processes have written
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        # another may have left half a line, on a disk that was full
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, line: str, *, most_waiting: int | None = None) -> None:
        """Appends a line.

        Args:
            most_waiting: drop it if so many lines wait already; None: never.
        """
        with self._lock:
            if most_waiting is None or len(self._waiting) < most_waiting:
                self._waiting.append((line + "\n").encode())
            self._flush()

    @property
    def behind(self) -> bool:
        """Whether lines wait for room."""
        return bool(self._waiting)

    def _flush(self) -> None:
        while self._waiting:
            line = (b"\n" if self._torn else b"") + self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError:
                # the disk is full: what waits is tried with the next line
                return
            # the rest of a line does not follow: others may have written meanwhile
            self._torn = written < len(line)
            if written < len(line):
                return
            # only what is in the file whole is forgotten
            del self._waiting[0]

    def close(self) -> None:
        """What could not be written by now is lost."""
        os.close(self._fd)
