"""CSV files, read by the offsets of their rows."""

from __future__ import annotations

import csv as csv_module
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from distlaunch.base.errors import DataError
from distlaunch.data.files.base import UnreadableRecordError
from distlaunch.data.files.listing import FileSet, Patterns, find_files
from distlaunch.data.files.records import FilesOfByteRanges, Format, ScanError, Scanned
from distlaunch.data.files.tables.base import Kind, Table, encode, kinds_from_facts
from distlaunch.data.files.tables.csv_kinds import Guess, merge_guesses
from distlaunch.data.files.tables.rows import Rows, scan_rows

_BYTES = "latin-1"  # maps each byte to one character, so that the bytes of the file do not change
_LARGEST_FIELD = 64 << 20  # characters; as large as the longest row


def csv(files: Patterns, *, columns: Sequence[str] | None = None, label: str | None = None) -> CSVFiles:
    """Return the rows of CSV files.

    As in RFC 4180, quoted fields may contain commas, line ends and doubled quotes.

    The first row of each file has the names of the columns. A column whose values in all files are integers is int64,
    or string if one of them needs more than 64 bits. Any other column is float32 if its values are numbers or empty
    (NaN), and string otherwise. Empty lines are skipped.

    Args:
        files: a path, a glob, a directory (its `*.csv` files), or a list of them.
        columns: the features; all columns by default.
        label: the column that is the label.

    Returns:
        A source of dicts of scalars, or of pairs of such a dict and the label.

    Raises:
        ConfigError: there are no such files or columns, the files are compressed, or they have no rows.
        DataError: a file is not a CSV file, or does not have the columns of the first file.
    """
    return CSVFiles(find_files(files, "a CSV file", ("*.csv",)), columns, label)


class CSVFiles(Table, FilesOfByteRanges):
    """See `csv`."""

    def __init__(self, files: FileSet, columns: Sequence[str] | None, label: str | None) -> None:
        super().__init__(files, Format("csv", 1, _scan, _merge))
        kinds = kinds_from_facts(self.facts)
        self._num_columns = len(kinds)
        places = {name: place for place, name in enumerate(kinds)}
        chosen = self._choose(kinds, columns, label, "columns")
        self._read_columns = [(places[name], kind) for name, kind in chosen.items()]
        self.raw_types = tuple(kind.spec() for kind in chosen.values())

    def _parse(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        try:
            return self._parse_rows(spans)
        # parsing all rows together is fast; parsing them one by one finds the one that fails
        except (csv_module.Error, ValueError, OverflowError):
            for position, span in enumerate(spans):
                try:
                    self._parse_rows([span])
                except (csv_module.Error, ValueError, OverflowError) as error:
                    raise UnreadableRecordError(
                        position, f"the row has changed since it was indexed: {error}"
                    ) from error
            raise

    def _parse_rows(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        rows = list(_split(span.decode(_BYTES) for span in spans))
        if len(rows) != len(spans) or any(len(row) != self._num_columns for row in rows):
            raise ValueError(f"expected a row of {self._num_columns} columns")
        columns = list(zip(*rows, strict=True)) or [()] * self._num_columns
        return tuple(_convert(columns[place], kind) for place, kind in self._read_columns)


def _convert(texts: Sequence[str], kind: Kind) -> np.ndarray:
    if kind.name == "int64":
        return np.array([int(text) for text in texts], np.int64)
    if kind.name == "float32":
        return np.array([float(text) if text else np.nan for text in texts], np.float32)
    return encode(texts, _BYTES)


def _split(lines: Iterable[str]) -> Iterable[list[str]]:
    if csv_module.field_size_limit() < _LARGEST_FIELD:
        csv_module.field_size_limit(_LARGEST_FIELD)  # Python's limit of 128 KiB may be too short for a text
    return csv_module.reader(lines, strict=True)


def _scan(descriptor: int, size: int) -> Scanned:
    header: list[str] | None = None
    guesses: list[Guess] = []
    parts = [np.empty(0, np.int64)]
    for rows in scan_rows(descriptor, size, quotes=True):
        parsed = _parse_block(rows)
        starts = rows.starts + rows.offset
        filled = [place for place, row in enumerate(parsed) if row]
        if header is None and filled:
            header = _read_header(parsed[filled[0]], int(starts[filled[0]]))
            guesses = [Guess() for _ in header]
            filled = filled[1:]
        if header is None or not filled:
            continue
        kept = [parsed[place] for place in filled]
        if set(map(len, kept)) != {len(header)}:
            _raise_wrong_length(kept, starts[filled], len(header))
        parts.append(starts[filled])
        for guess, texts in zip(guesses, zip(*kept, strict=True), strict=True):
            guess.add(texts)
    return Scanned(np.concatenate(parts), (header, guesses))


def _raise_wrong_length(rows: list[list[str]], starts: np.ndarray, num_columns: int) -> None:
    for row, start in zip(rows, starts.tolist(), strict=True):
        if len(row) != num_columns:
            raise ScanError(start, f"the row has {len(row)} columns, but the header has {num_columns}")


def _parse_block(rows: Rows) -> list[list[str]]:
    # only LF ends a line, because CR may be part of a line end or of a quoted field
    reader = _split(io.StringIO(rows.data.decode(_BYTES), newline="\n"))
    parsed: list[list[str]] = []
    message = "a field that contains a quote must be quoted, and the quote must be doubled"
    try:
        parsed.extend(reader)
    except csv_module.Error as error:
        message = str(error)
    if len(parsed) == len(rows.starts):
        return parsed
    # find the row that fails
    for start, line in zip(rows.starts, rows.lines(), strict=True):
        try:
            alone = list(_split(io.StringIO(line.decode(_BYTES), newline="\n")))
        except csv_module.Error as error:
            raise ScanError(rows.offset + int(start), f"the row is not CSV: {error}") from None
        if len(alone) != 1:
            raise ScanError(rows.offset + int(start), f"the row is not CSV: {message}")
    raise ScanError(rows.offset, f"the rows from here on are not CSV: {message}")


def _read_header(row: list[str], offset: int) -> list[str]:
    try:
        names = [name.encode(_BYTES).decode() for name in row]
    except UnicodeDecodeError as error:
        raise ScanError(offset, f"the names of the columns are not UTF-8: {error}") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ScanError(offset, f"the header names a column more than once: {', '.join(twice)}")
    return names


def _merge(facts: dict[str, Any]) -> dict[str, Any]:
    named = {path: header for path, (header, _) in facts.items() if header is not None}
    first = next(iter(named), None)
    if first is None:
        return {"columns": {}}
    for path, header in named.items():
        if header != named[first]:
            raise DataError(
                f"{path} has the columns {', '.join(header)}; expected those of {first}: {', '.join(named[first])}"
            )
    # an empty file has no columns, so it is ignored
    of_files = [guesses for header, guesses in facts.values() if header is not None]
    kinds = [merge_guesses(guesses).to_plain() for guesses in zip(*of_files, strict=True)]
    return {"columns": dict(zip(named[first], kinds, strict=True))}
