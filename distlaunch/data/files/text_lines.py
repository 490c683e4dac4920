"""Lines of text files, read by offset."""

from __future__ import annotations

import numpy as np

from distlaunch.data.files.base import STRING, as_objects
from distlaunch.data.files.listing import Patterns, find_files
from distlaunch.data.files.records import FilesOfByteRanges, Format, Scanned
from distlaunch.data.files.tables.rows import scan_rows


def text_lines(files: Patterns) -> TextLines:
    """Return the lines of text files, including empty ones; each is a scalar string without its LF or CRLF.

    Args:
        files: a path, a glob, a directory (its `*.txt` and `*.text` files), or a list of them.

    Raises:
        ConfigError: there are no such files, they are compressed, or they have no lines.
        DataError: a file cannot be read.
    """
    found = find_files(files, "a text file", ("*.txt", "*.text"))
    return TextLines(found, Format("text", 1, scan))


class TextLines(FilesOfByteRanges):
    """See `text_lines`."""

    raw_types = (STRING,)

    def _parse(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        return (as_objects([span.removesuffix(b"\n").removesuffix(b"\r") for span in spans]),)


def scan(descriptor: int, size: int) -> Scanned:
    parts = [rows.starts + rows.offset for rows in scan_rows(descriptor, size)]
    return Scanned(np.concatenate([np.empty(0, np.int64), *parts]))
