"""Sources whose examples are consecutive ranges of bytes, with an index of their offsets."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distlaunch.base.errors import DataError
from distlaunch.data.files.base import FilesOfRecords
from distlaunch.data.files.byte_reader import ByteReader, Descriptor, changed_size
from distlaunch.data.files.index_cache import Index, cached_index
from distlaunch.data.files.listing import FileSet
from distlaunch.data.files.samples import why_unreadable

_NUM_THREADS = 8  # more than one, to hide the latency of file systems


class ScanError(Exception):
    """A file does not have the expected format.

    Attributes:
        offset: position of the problem in bytes.
    """

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True)
class Scanned:
    """The records found in one file.

    Attributes:
        starts: integers [records], the offset of each record in bytes.
        facts: further facts that the format needs.
    """

    starts: np.ndarray
    facts: Any = None


Scan = Callable[[int, int], Scanned]
"""Function of a file's descriptor and its size in bytes; it may raise ScanError or OSError."""


@dataclass(frozen=True)
class Format:
    """Description of a file format, for building an index.

    Attributes:
        kind: name of the format.
        version: version of `scan` and `merge`; cached indices of other versions are not used.
        scan: finds the records of a file.
        merge: takes the facts of each file, by path, and returns the facts about all files, as JSON types.
    """

    kind: str
    version: int
    scan: Scan
    merge: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda facts: {})


class FilesOfByteRanges(FilesOfRecords):
    """Examples that are ranges of bytes, each of which ends where the next one starts, or at the end of the file.

    Raises:
        DataError: a file does not have the expected format.
    """

    def __init__(self, files: FileSet, form: Format) -> None:
        index = cached_index(files, form.kind, form.version, lambda: _build(files, form))
        super().__init__(files, index.arrays["firsts"])
        self.facts = index.facts
        self.starts = index.arrays["starts"]
        self._sizes = np.array(files.sizes, np.int64)
        self._reader = ByteReader(files)

    def where(self, index: int) -> str:
        return f"{super().where(index)} at byte {int(self.starts[index]):,}"

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        file_ids, _ = self.locate(indices)
        starts = self.starts[indices].astype(np.int64)
        following = indices + 1
        is_last = following == self.firsts[file_ids + 1]
        # the inner `where` avoids an index out of bounds for the last record
        ends = np.where(is_last, self._sizes[file_ids], self.starts[np.where(is_last, 0, following)])
        return self._parse(self._reader.read(file_ids, starts, ends.astype(np.int64)))

    @abstractmethod
    def _parse(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        """Return the result of `read`, given the bytes of each record.

        Raises:
            UnreadableRecordError: a record cannot be parsed.
        """


def _build(files: FileSet, form: Format) -> Index:
    # four bytes are enough for most files
    offset = np.uint32 if max(files.sizes) < 1 << 32 else np.uint64

    def scan(file_id: int) -> Scanned:
        found = _scan_file(files.paths[file_id], files.sizes[file_id], form.scan)
        return Scanned(found.starts.astype(offset), found.facts)

    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        scanned = list(pool.map(scan, range(len(files.paths))))
    finally:
        # after an error, the other files need not be read
        pool.shutdown(cancel_futures=True)
    firsts = np.cumsum([0, *(len(found.starts) for found in scanned)], dtype=np.int64)
    starts = np.concatenate([found.starts for found in scanned])
    facts = form.merge({path: found.facts for path, found in zip(files.paths, scanned, strict=True)})
    return Index({"firsts": firsts, "starts": starts}, facts)


def _scan_file(path: str, size: int, scan: Scan) -> Scanned:
    try:
        opened = Descriptor(path)
        found = scan(opened.number, size)
        # checked after the scan, because a process that writes the file may have written half a record
        now = os.fstat(opened.number).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be indexed: {why_unreadable(error)}") from error
    except ScanError as error:
        raise DataError(f"{path}, at byte {error.offset:,}: {error}") from error
    if now != size:
        raise DataError(f"{path} cannot be indexed while it is written: {changed_size(size, now)}")
    return found
