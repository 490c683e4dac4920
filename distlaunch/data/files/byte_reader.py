"""Reads spans of bytes of many files: by several threads at once, with few files open, neighbours in one go."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np

from distlaunch.data.files.base import UnreadableRecordError
from distlaunch.data.files.listing import FileSet
from distlaunch.data.files.samples import why_unreadable

MOST_OPEN = 64  # per source: limits of 1,024 files are common
_MOST_SKIPPED_BYTES = 16 << 10  # reading these costs less than another call
_MOST_AT_ONCE_BYTES = 4 << 20  # of one call, which is held in memory


class Descriptor:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: str) -> None:
        # no file object, whose buffer and position threads would share
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` is gone when Python ends
        if hasattr(self, "number"):
            close(self.number)


class ByteReader:
    """Reads spans of the files of a set.

    Reads have offsets of their own and no lock is held, so threads and forked processes may share it.
    """

    def __init__(self, files: FileSet) -> None:
        self._files = files
        self._open = functools.lru_cache(maxsize=MOST_OPEN)(functools.partial(_open_unchanged, files))

    def read(self, file_ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """Return the bytes of each span in the order of the arguments, which are int64 [n].

        Raises:
            UnreadableRecordError: a file has vanished, changed, or cannot be read.
        """
        # by file, then by offset: neighbours come next to each other
        order = np.lexsort((starts, file_ids)).tolist()
        files, begins, stops = file_ids.tolist(), starts.tolist(), ends.tolist()
        found: list[bytes] = [b""] * len(order)
        group: list[int] = []
        low = high = 0
        for place in order:
            begin, stop = begins[place], stops[place]
            # one call for spans of a file that touch, or nearly so
            near = group and files[place] == files[group[0]] and begin - high <= _MOST_SKIPPED_BYTES
            if not near or stop - low > _MOST_AT_ONCE_BYTES:
                self._read_group(group, files, begins, stops, found)
                group, low, high = [], begin, stop
            group.append(place)
            # spans may overlap: the same example twice
            high = max(high, stop)
        self._read_group(group, files, begins, stops, found)
        return found

    def _read_group(
        self, group: list[int], files: list[int], begins: list[int], stops: list[int], found: list[bytes]
    ) -> None:
        if not group:
            return
        low, high = begins[group[0]], max(stops[place] for place in group)
        try:
            opened = self._open(files[group[0]])
            data = read_fully(opened.number, low, high - low)
        except OSError as error:
            raise UnreadableRecordError(group[0], why_unreadable(error)) from error
        except _ChangedError as error:
            raise UnreadableRecordError(group[0], str(error)) from error
        for place in group:
            if stops[place] - low > len(data):
                now = os.fstat(opened.number).st_size
                raise UnreadableRecordError(place, changed_size(self._files.sizes[files[place]], now))
            found[place] = data[begins[place] - low : stops[place] - low]


class _ChangedError(Exception):
    pass


def _open_unchanged(files: FileSet, file_id: int) -> Descriptor:
    opened = Descriptor(files.paths[file_id])
    size, known = os.fstat(opened.number).st_size, files.sizes[file_id]
    if size != known:
        raise _ChangedError(changed_size(known, size))
    return opened


def unchanged(files: FileSet, file_id: int) -> str:
    """Return the path of a file. Raise ValueError if its size has changed, OSError if it is gone."""
    path, known = files.paths[file_id], files.sizes[file_id]
    size = os.stat(path).st_size
    if size != known:
        raise ValueError(changed_size(known, size))
    return path


def changed_size(known: int, found: int) -> str:
    """Describe a file whose size in bytes has changed since it was indexed."""
    what = "was truncated" if found < known else "has changed since it was indexed"
    return f"the file {what}: {known:,} bytes when indexed, {found:,} now"


def read_fully(descriptor: int, start: int, num_bytes: int) -> bytes:
    """Read like `os.pread`, but return fewer bytes only at the end of the file."""
    data = os.pread(descriptor, num_bytes, start)
    # `pread` may return less, as on network file systems or above 2 GiB
    while 0 < len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), start + len(data))
        if not more:
            break
        data += more
    return data
