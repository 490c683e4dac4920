"""Reads files of a run that anybody may have put there: pipes and devices would block, and huge files fill memory."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Largest size of a record: metadata, a plan, an error."""


class NotRegularError(OSError):
    """Raised where a path leads to a folder, a pipe or a device."""


def open_regular(path: str | Path, buffering: int = -1) -> Any:
    """Open a file for reading bytes.

    Args:
        buffering: as of `open`.

    Raises:
        NotRegularError: it is no regular file.
        OSError: it cannot be opened.
    """
    # without waiting: opening a named pipe would wait for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(fd, "rb", buffering)


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return what a file holds.

    Args:
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return what a file of JSON holds.

    Raises:
        OSError: as of `read_regular`.
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(read_regular(path, most))
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
