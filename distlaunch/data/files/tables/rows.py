"""Finds the rows of text files: lines, or rows of CSV, which may have line ends within quotes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distlaunch.data.files.byte_reader import read_fully
from distlaunch.data.files.records import ScanError

# with larger blocks, the garbage collector scans more objects, which takes 3 times as long
AT_ONCE_BYTES = 64 << 10
LONGEST_ROW_BYTES = 64 << 20  # limits the memory if a quote is never closed
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Rows:
    """Some whole rows of a file.

    Attributes:
        offset: offset of the first row in the file, in bytes.
        data: bytes of all rows, with line ends.
        starts: int64 [rows], offset of each row in `data`.
    """

    offset: int
    data: bytes
    starts: np.ndarray

    def lines(self) -> Iterator[bytes]:
        """Yield each row with its line end."""
        bounds = [*self.starts.tolist(), len(self.data)]
        return (self.data[start:end] for start, end in itertools.pairwise(bounds))


def scan_rows(descriptor: int, size: int, *, quotes: bool = False) -> Iterator[Rows]:
    """Yield the rows of a UTF-8 file, without its byte order mark.

    Args:
        size: size of the file in bytes.
        quotes: whether line ends within double quotes belong to the row.

    Raises:
        ScanError: the text is UTF-16, the file was truncated, a quote is not closed, or a row is longer than 64 MiB.
    """
    mark = read_fully(descriptor, 0, len(_BYTE_ORDER_MARK))
    if mark.startswith(_UTF16_MARKS):
        raise ScanError(0, "the text is UTF-16; convert it to UTF-8, for instance with 'iconv -f UTF-16 -t UTF-8'")
    offset = len(_BYTE_ORDER_MARK) if mark == _BYTE_ORDER_MARK else 0
    data, at = b"", offset
    while at < size:
        # at least as much as is left over, so that a long row is not scanned again for each block
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
        # a quote within quotes is doubled, so at the end of a row the number of quotes so far is even
        before = np.searchsorted(np.flatnonzero(array == ord('"')), ends)
        ends = ends[before % 2 == 0]
    return ends + 1
