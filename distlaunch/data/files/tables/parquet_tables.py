"""Parquet files, read by row groups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from distlaunch.base.errors import DataError
from distlaunch.data.files.base import FilesOfRecords, UnreadableRecordError, first_line
from distlaunch.data.files.byte_reader import unchanged
from distlaunch.data.files.index_cache import Index, cached_index
from distlaunch.data.files.listing import FileSet, Patterns, find_files
from distlaunch.data.files.samples import why_unreadable
from distlaunch.data.files.tables.base import Table, kinds_from_facts
from distlaunch.data.files.tables.parquet_columns import as_numpy, kind_of, library
from distlaunch.data.files.tables.row_groups import RowGroupCache

_NUM_THREADS = 8


def parquet(files: Patterns, *, columns: Sequence[str] | None = None, label: str | None = None) -> ParquetFiles:
    """Return the rows of Parquet files. Needs the extra `parquet`.

    Columns have the types of the files: integers, floats, booleans, strings and lists of fixed size. Missing floats are
    NaN, and missing strings are empty; other missing values are errors. The latest row groups stay in memory, up to
    256 MiB. So reading in random order is fast if the data is smaller, or if row groups are small.

    Args:
        files: a path, a glob, a directory (its `*.parquet` files), or a list of them.
        columns: the features; all columns by default.
        label: the column that is the label.

    Returns:
        A source of dicts of tensors, or of pairs of such a dict and the label.

    Raises:
        ConfigError: there are no such files or columns, a column has another type, the files have no rows, or the
            library is not installed.
        DataError: a file is damaged, or does not have the columns of the first file.
    """
    return ParquetFiles(find_files(files, "a Parquet file", ("*.parquet",)), columns, label)


class ParquetFiles(Table, FilesOfRecords):
    """See `parquet`."""

    def __init__(self, files: FileSet, columns: Sequence[str] | None, label: str | None) -> None:
        library()
        index = cached_index(files, "parquet", 1, lambda: _build(files))
        super().__init__(files, index.arrays["firsts"], "a row")
        self._group_firsts = index.arrays["group_firsts"]
        self._first_groups = index.arrays["first_groups"]
        self._kinds = self._choose(kinds_from_facts(index.facts), columns, label, "columns")
        self.raw_types = tuple(kind.spec() for kind in self._kinds.values())
        self._cache = RowGroupCache(self._load)

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        groups = np.searchsorted(self._group_firsts, indices, side="right") - 1
        found = [
            np.empty((len(indices), *kind.shape), object if kind.name == "string" else kind.name)
            for kind in self._kinds.values()
        ]
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            table = self._get(group, int(places[0]))
            # in the order of `places`, for the assignment below
            rows = table.take(indices[places] - self._group_firsts[group])
            for array, (name, kind) in zip(found, self._kinds.items(), strict=True):
                values, null = as_numpy(rows.column(name), kind)
                if null is not None:
                    reason = f"column '{name}' has a null here, which a tensor of {kind.name} cannot hold"
                    raise UnreadableRecordError(int(places[null]), f"{reason}; replace nulls when you write the file")
                array[places] = values
        return tuple(found)

    def _get(self, group: int, place: int) -> Any:
        try:
            return self._cache.get(group)
        except FileNotFoundError as error:
            raise UnreadableRecordError(place, why_unreadable(error)) from error
        except (OSError, ValueError, KeyError) as error:  # these include pyarrow's errors
            raise UnreadableRecordError(place, first_line(error)) from error

    def _load(self, group: int) -> Any:
        file_id = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        path = unchanged(self.files, file_id)
        # pages without a checksum are accepted
        with library().ParquetFile(path, page_checksum_verification=True) as opened:
            # without threads, because the pipeline's threads read several groups at the same time
            table = opened.read_row_group(
                group - int(self._first_groups[file_id]), columns=list(self._kinds), use_threads=False
            )
        expected = int(self._group_firsts[group + 1] - self._group_firsts[group])
        if table.num_rows != expected:
            raise ValueError(f"the row group has {table.num_rows:,} rows; it had {expected:,} when it was indexed")
        return table.combine_chunks()


def _build(files: FileSet) -> Index:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(pool.map(_examine, files.paths))
    filled = [place for place, (groups, _) in enumerate(found) if sum(groups)]  # files without rows have no types
    first = filled[0] if filled else 0
    columns = found[first][1]
    for place in filled:
        path, other = files.paths[place], found[place][1]
        if other != columns:
            different = sorted(name for name in {*columns, *other} if columns.get(name) != other.get(name))
            raise DataError(
                f"{path} does not have the same columns as {files.paths[first]}; they differ in "
                f"{', '.join(different) or 'order'}"
            )
    rows = [group for groups, _ in found for group in groups]
    group_firsts = np.cumsum([0, *rows], dtype=np.int64)
    first_groups = np.cumsum([0, *(len(groups) for groups, _ in found)], dtype=np.int64)
    return Index(
        {"firsts": group_firsts[first_groups], "group_firsts": group_firsts, "first_groups": first_groups},
        {"columns": columns},
    )


def _examine(path: str) -> tuple[list[int], dict[str, Any]]:
    """Return the number of rows of each row group, and the columns, of one file."""
    try:
        with library().ParquetFile(path) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
            groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except FileNotFoundError as error:
        raise DataError(f"{path} cannot be indexed: {why_unreadable(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a Parquet file: {first_line(error)}") from error
    return groups, {column.name: kind_of(column.type).to_plain() for column in schema}
