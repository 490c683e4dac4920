"""Files of JSON lines, with an object in each line, read by offset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distlaunch.data.files.base import UnreadableRecordError, as_objects, first_line
from distlaunch.data.files.listing import FileSet, Patterns, find_files
from distlaunch.data.files.records import FilesOfByteRanges, Format, ScanError, Scanned
from distlaunch.data.files.tables.base import Kind, Table, kinds_from_facts
from distlaunch.data.files.tables.json_kinds import Fields
from distlaunch.data.files.tables.rows import scan_rows


def json_lines(files: Patterns, *, fields: Sequence[str] | None = None, label: str | None = None) -> JSONLines:
    """Return the JSON objects of files with an object in each line; empty lines are skipped.

    A field is int64, float32, bool or string. Lists, also nested ones, become tensors, and must have the same shape in
    all records. Values that are null or missing become NaN or an empty string. Integers with missing values become
    float32.

    Args:
        files: a path, a glob, a directory (its `*.jsonl` and `*.ndjson` files), or a list of them.
        fields: the features; all fields by default.
        label: the field that is the label.

    Returns:
        A source of dicts of tensors, or of pairs of such a dict and the label.

    Raises:
        ConfigError: there are no such files or fields, the files are compressed, a field cannot be a tensor, or there
            are no records.
        DataError: a line is not a JSON object.
    """
    return JSONLines(find_files(files, "a file of JSON lines", ("*.jsonl", "*.ndjson")), fields, label)


class JSONLines(Table, FilesOfByteRanges):
    """See `json_lines`."""

    def __init__(self, files: FileSet, fields: Sequence[str] | None, label: str | None) -> None:
        super().__init__(files, Format("jsonl", 1, _scan, _merge))
        self._kinds = self._choose(kinds_from_facts(self.facts), fields, label, "fields")
        self.raw_types = tuple(kind.spec() for kind in self._kinds.values())

    def _parse(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        records: list[dict[str, Any]] = []
        for position, span in enumerate(spans):
            try:
                records.append(parse_object(span))
            except ValueError as error:
                raise UnreadableRecordError(position, f"the line has changed since it was indexed: {error}") from error
        try:
            return self._convert(records)
        except (ValueError, TypeError, OverflowError):
            for position, record in enumerate(records):
                try:
                    self._convert([record])
                except (ValueError, TypeError, OverflowError) as error:
                    reason = f"the line has changed since it was indexed: {first_line(error)}"
                    raise UnreadableRecordError(position, reason) from error
            raise

    def _convert(self, records: list[dict[str, Any]]) -> tuple[np.ndarray, ...]:
        return tuple(_as_array([record.get(name) for record in records], kind) for name, kind in self._kinds.items())


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse the object in a line of JSON.

    Raises:
        ValueError: the line is not a JSON object; the message is for users.
    """
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}; expected an object, such as {{'text': 'good', 'label': 1}}")
    return value


def _as_array(values: list[Any], kind: Kind) -> np.ndarray:
    if kind.missing:
        values = [_fill(value, kind.shape, "" if kind.name == "string" else np.nan) for value in values]
    shape = (len(values), *kind.shape)
    if kind.name == "string":
        for _ in kind.shape:
            values = [item for value in values for item in value]
        array = as_objects([_encode(value) for value in values])
        return array.reshape(shape)
    array = np.array(values, kind.name) if values else np.empty(shape, kind.name)
    if array.shape != shape:
        raise ValueError(f"got the shape {array.shape[1:]}; expected {kind.shape}")
    return array


def _encode(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"got {type(value).__name__}; expected a string")
    # JSON may contain surrogates, such as "\ud800"
    return value.encode("utf-8", "surrogatepass")


def _fill(value: Any, shape: tuple[int, ...], missing: Any) -> Any:
    """Return the value with replacements for null."""
    if not shape:
        return missing if value is None else value
    items = [None] * shape[0] if value is None else value
    return [_fill(item, shape[1:], missing) for item in items]


def _scan(descriptor: int, size: int) -> Scanned:
    fields = Fields()
    parts = [np.empty(0, np.int64)]
    for rows in scan_rows(descriptor, size):
        starts, records = [], []
        for start, line in zip((rows.starts + rows.offset).tolist(), rows.lines(), strict=True):
            # only the characters that are white space in JSON
            if not line.strip(b" \t\r\n"):
                continue
            try:
                records.append(parse_object(line))
            except ValueError as error:
                raise ScanError(start, f"the line cannot be read: {error}") from None
            starts.append(start)
        fields.add(records)
        parts.append(np.array(starts, np.int64))
    return Scanned(np.concatenate(parts), fields)


def _merge(facts: Mapping[str, Fields]) -> dict[str, Any]:
    merged = Fields()
    for fields in facts.values():
        merged.merge(fields)
    return {"columns": {name: kind.to_plain() for name, kind in merged.kinds().items()}}
