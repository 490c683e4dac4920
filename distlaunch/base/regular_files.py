"""Reads files of a run safely: refuses pipes and devices, which could block, and files that are too large."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record: metadata, a plan, an error."""


class NotRegularError(OSError):
    """A path leads to a folder, a pipe or a device."""


def open_regular(path: str | Path, buffering: int = -1) -> Any:
    """Open a file for reading bytes.

    Args:
        buffering: see `open`.

    Raises:
        NotRegularError: the path is not a regular file.
        OSError: it cannot be opened.
    """
    # O_NONBLOCK, since opening a named pipe would wait for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(fd, "rb", buffering)


def read_regular(path: str | Path, most: int = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a file.

    Args:
        most: maximum size in bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def read_json(path: str | Path, most: int = MAX_RECORD_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: see `read_regular`.
        ValueError: the file is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_regular(path, most))
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
