"""Reads byte ranges of many files from several threads, with few open files and one call for adjacent ranges."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np

from distlaunch.data.files.base import UnreadableRecordError
from distlaunch.data.files.listing import FileSet
from distlaunch.data.files.samples import why_unreadable

MOST_OPEN = 64  # open files per source; processes are often limited to 1,024
_MOST_SKIPPED_BYTES = 16 << 10  # largest gap between two ranges of one call; reading it costs less than another call
_MOST_AT_ONCE_BYTES = 4 << 20  # largest number of bytes of one call, which are held in memory


class Descriptor:
    """An open file, which is closed when the object is no longer used."""

    def __init__(self, path: str) -> None:
        # a descriptor, because threads would share the buffer and position of a file object
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python exits
        if hasattr(self, "number"):
            close(self.number)


class ByteReader:
    """Reads byte ranges of a set of files.

    Each call passes its offset and holds no lock, so threads and forked processes may share an object.
    """

    def __init__(self, files: FileSet) -> None:
        self._files = files
        self._open = functools.lru_cache(maxsize=MOST_OPEN)(functools.partial(_open_unchanged, files))

    def read(self, file_ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """Return the bytes of each range, in the order of the arguments, which are int64 [n].

        Raises:
            UnreadableRecordError: a file has vanished, changed, or cannot be read.
        """
        # by file and offset, so that adjacent ranges follow each other
        order = np.lexsort((starts, file_ids)).tolist()
        files, begins, stops = file_ids.tolist(), starts.tolist(), ends.tolist()
        found: list[bytes] = [b""] * len(order)
        group: list[int] = []
        low = high = 0
        for place in order:
            begin, stop = begins[place], stops[place]
            # one call for ranges with small gaps
            near = group and files[place] == files[group[0]] and begin - high <= _MOST_SKIPPED_BYTES
            if not near or stop - low > _MOST_AT_ONCE_BYTES:
                self._read_group(group, files, begins, stops, found)
                group, low, high = [], begin, stop
            group.append(place)
            # ranges may overlap, if an example is requested twice
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
    """Return the path of a file whose size has not changed.

    Raises:
        ValueError: the size has changed.
        OSError: the file does not exist any longer.
    """
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
    # `pread` may return fewer bytes on network file systems or above 2 GiB
    while 0 < len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), start + len(data))
        if not more:
            break
        data += more
    return data
