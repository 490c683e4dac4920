"""Finds the rows of text files: lines, or rows of CSV with line ends within quotes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distlaunch.data.files.byte_reader import read_fully
from distlaunch.data.files.records import ScanError

# larger blocks make more objects at once, which the garbage collector goes through: 3 x slower
AT_ONCE_BYTES = 64 << 10
LONGEST_ROW_BYTES = 64 << 20  # a quote that is never closed would take the whole file
_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Rows:
    """Some whole rows of a file.

    Attributes:
        offset: of the first of them, in bytes.
        data: the bytes of all, with line ends.
        starts: int64 [rows], where each starts in `data`.
    """

    offset: int
    data: bytes
    starts: np.ndarray

    def lines(self) -> Iterator[bytes]:
        """Yield each row with its line end."""
        bounds = [*self.starts.tolist(), len(self.data)]
        return (self.data[start:end] for start, end in itertools.pairwise(bounds))


def scan_rows(descriptor: int, size: int, *, quotes: bool = False) -> Iterator[Rows]:
    """Scan a file in UTF-8, without its byte order mark.

    Args:
        size: in bytes.
        quotes: line ends between double quotes belong to the row.

    Raises:
        ScanError: it is no such file, or a row is longer than 64 MiB.
    """
    mark = read_fully(descriptor, 0, len(_MARK))
    if mark.startswith(_WIDE_MARKS):
        raise ScanError(0, "the text is UTF-16; convert it to UTF-8, as with 'iconv -f UTF-16 -t UTF-8'")
    offset = len(_MARK) if mark == _MARK else 0
    data, at = b"", offset
    while at < size:
        # as much again as is left over: a long row is not gone through once for each block
        block = read_fully(descriptor, at, min(size - at, max(AT_ONCE_BYTES, len(data))))
        if not block:
            raise ScanError(at, f"the file was truncated while it was indexed; it had {size:,} bytes")
        data, at = data + block, at + len(block)
        ends = _row_ends(data, quotes)
        if at >= size and not (len(ends) and ends[-1] == len(data)):  # the last row needs no line end
            if quotes and data.count(b'"') % 2:
                raise ScanError(offset + (int(ends[-1]) if len(ends) else 0), "a quote in this row is never closed")
            ends = np.append(ends, len(data))
        if len(ends):
            done = int(ends[-1])
            yield Rows(offset, data[:done], np.concatenate([[0], ends[:-1]]))
            offset, data = offset + done, data[done:]
        if len(data) > LONGEST_ROW_BYTES:
            why = "; is a quote in it never closed?" if quotes else "; are these lines of text?"
            raise ScanError(offset, f"the row is longer than {LONGEST_ROW_BYTES >> 20} MiB{why}")


def _row_ends(data: bytes, quotes: bool) -> np.ndarray:
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == ord("\n"))
    if quotes and b'"' in data:
        # a quote within quotes is written twice, so outside of them the number of quotes so far is even
        before = np.searchsorted(np.flatnonzero(array == ord('"')), ends)
        ends = ends[before % 2 == 0]
    return ends + 1
