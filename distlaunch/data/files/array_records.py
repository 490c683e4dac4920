"""ArrayRecord files, read by number."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from distlaunch.base.errors import DataError
from distlaunch.data.files.base import STRING, FilesOfRecords, UnreadableRecordError, as_objects, first_line
from distlaunch.data.files.byte_reader import unchanged
from distlaunch.data.files.index_cache import Index, cached_index
from distlaunch.data.files.listing import FileSet, Patterns, data_function_error, find_files
from distlaunch.data.files.samples import why_unreadable

_MOST_OPEN = 64  # readers per source
_NUM_THREADS = 8  # more than one, to hide the latency of network file systems
# without reading ahead and without threads, which would not exist in a forked process
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_ERRORS = (RuntimeError, ValueError, IndexError)  # raised by the library for a damaged file


def array_record(files: Patterns) -> ArrayRecordFiles:
    """Return the records of ArrayRecord files, each a scalar string. Needs the extra `grain`.

    Files that are written with `group_size:1` are the fastest to read in random order.

    Args:
        files: a path, a glob, a directory (its files named `*.array_record*` or `*.arrayrecord*`), or a list of them.

    Raises:
        ConfigError: there are no such files, they have no records, or the library is not installed.
        DataError: a file is damaged, or is not an ArrayRecord file.
    """
    return ArrayRecordFiles(find_files(files, "an ArrayRecord file", ("*.array_record*", "*.arrayrecord*")))


class ArrayRecordFiles(FilesOfRecords):
    """See `array_record`."""

    raw_types = (STRING,)

    def __init__(self, files: FileSet) -> None:
        _library()
        index = cached_index(files, "arrayrecord", 1, lambda: _count(files))
        super().__init__(files, index.arrays["firsts"])
        # one reader for each process, because a forked process would share the file position of an inherited reader
        self._open = functools.lru_cache(maxsize=_MOST_OPEN)(lambda file_id, process: _open(files, file_id))

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        file_ids, records = self.locate(indices)
        found = np.empty(len(indices), object)
        for file_id in np.unique(file_ids).tolist():
            places = np.flatnonzero(file_ids == file_id)
            try:
                reader = self._open(file_id, os.getpid())
            except OSError as error:
                raise UnreadableRecordError(int(places[0]), why_unreadable(error)) from error
            except _ERRORS as error:
                raise UnreadableRecordError(int(places[0]), first_line(error)) from error
            # one call for each file, because the library reads many records together
            found[places] = as_objects(_read_records(reader, records[places], places))
        return (found,)


def _read_records(reader: Any, records: np.ndarray, places: np.ndarray) -> list[bytes]:
    try:
        return reader.read(records.tolist())
    except _ERRORS as failed:
        for place, record in zip(places.tolist(), records.tolist(), strict=True):
            try:
                reader.read([record])
            except _ERRORS as error:
                raise UnreadableRecordError(place, f"the file is damaged: {first_line(error)}") from error
        raise UnreadableRecordError(int(places[0]), first_line(failed)) from failed


def _open(files: FileSet, file_id: int) -> Any:
    reader = _library().ArrayRecordReader(unchanged(files, file_id), _OPTIONS)
    if not reader.ok():
        raise ValueError("it is not an ArrayRecord file, or it is damaged")
    return reader


def _count(files: FileSet) -> Index:
    def count(file_id: int) -> int:
        path = files.paths[file_id]
        if files.sizes[file_id] == 0:
            return 0
        try:
            return _open(files, file_id).num_records()
        except OSError as error:
            raise DataError(f"{path} cannot be indexed: {why_unreadable(error)}") from error
        except _ERRORS as error:
            raise DataError(f"{path} cannot be read as an ArrayRecord file: {first_line(error)}") from error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        counts = list(pool.map(count, range(len(files.paths))))
    return Index({"firsts": np.cumsum([0, *counts], dtype=np.int64)})


def _library() -> Any:
    try:
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise data_function_error("ArrayRecord files need a library: pip install 'distlaunch[grain]'") from None
    return array_record_module
