"""Reads text files for an exported model: .txt, .jsonl, .csv and .tsv."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distlaunch.base.errors import UsageError
from distlaunch.serving.exported_model import ANY, Spec
from distlaunch.serving.fit import quoted, takes

_LONGEST = 40  # characters of a value in a message


def read_txt(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """One text a line."""
    if len(inputs) > 1 or inputs[0].dtype not in ("string", ANY):
        raise UsageError(f"{path}: a .txt file is one text a line; {takes(inputs)}")
    return {inputs[0].name: np.array(_lines(path), dtype=object)}


def read_jsonl(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """One row a line: an object with a value for each input, or the value of the only one."""
    columns: dict[str, list[Any]] = {spec.name: [] for spec in inputs}
    for number, line in enumerate(_lines(path), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: it is not JSON: {error}") from None
        except RecursionError:
            raise UsageError(f"{path}:{number}: its lists are nested too deeply") from None
        if not isinstance(value, dict):
            if len(inputs) > 1:
                raise UsageError(f"{path}:{number}: expected an object with a value for each input; {takes(inputs)}")
            value = {inputs[0].name: value}
        missing = [name for name in columns if name not in value]
        if missing:
            raise UsageError(f"{path}:{number}: no {quoted(missing)}; it has {quoted(value)}; {takes(inputs)}")
        for name, column in columns.items():
            column.append(value[name])
    return {spec.name: _array_of_rows(columns[spec.name], spec, path) for spec in inputs}


def read_csv(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """Columns by name, after a line that names them; values in a .tsv file are not quoted."""
    # Python's limit of 128 KiB is short for a text; more than this does not fit its C long everywhere
    csv.field_size_limit(2**31 - 1)
    options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {"strict": True}
    texts = _lines(path)
    # line ends are given back: a quoted field may hold them
    reader = csv.reader((f"{text}\n" for text in texts), **options)
    rows, numbers = [], []
    try:
        for row in reader:
            if row:
                rows.append(row)
                # of its last line: rows with line ends in quotes take several
                numbers.append(reader.line_num)
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: it is not {path.suffix[1:].upper()}: {error}") from None
    if not rows:
        raise UsageError(f"{path}: it is empty; expected a line of column names")
    header = [name.strip() for name in rows.pop(0)]
    numbers.pop(0)
    if all(_is_number(name) for name in header):
        raise UsageError(f"{path}:1: got {quoted(header)}; expected the names of the columns; {takes(inputs)}")
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise UsageError(f"{path}:1: the column {quoted(repeated)} comes twice")
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != len(header):
            raise UsageError(f"{path}:{number}: got {len(row)} values; expected {len(header)}, as there are columns")
    chosen = _columns(header, inputs, path)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
    return {
        spec.name: _array_of_columns({name: columns[name] for name in chosen[spec.name]}, numbers, spec, path)
        for spec in inputs
    }


def _lines(path: Path) -> list[str]:
    """Lines without their ends, blank ones too; only what follows the last line end is no line if it is empty."""
    # the mark that Windows programs put before UTF-8
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{number}: it is not UTF-8: {error.reason} (byte {error.start + 1})") from None
    return texts


def _array_of_rows(rows: list[Any], spec: Spec, path: Path) -> np.ndarray:
    if not rows:
        return np.zeros([0])
    first = None
    for number, row in enumerate(rows, 1):
        try:
            array = np.array(row, dtype=object if isinstance(row, str) else None)
        except ValueError:
            raise UsageError(f"{path}:{number}: {spec.name}: rows of different lengths; {takes([spec])}") from None
        kind = (array.shape, array.dtype.kind in "OSU")
        first = first or kind
        if kind != first or (array.dtype.kind == "O" and not isinstance(row, str)):
            shape = ",".join(map(str, array.shape))
            raise UsageError(f"{path}:{number}: {spec.name}: got {_short(row)} [{shape}], unlike the lines before; "
                             f"{takes([spec])}")  # fmt: skip
    return np.array(rows, dtype=object if isinstance(rows[0], str) else None)


def _columns(header: list[str], inputs: Sequence[Spec], path: Path) -> dict[str, list[str]]:
    """The columns of each input: of its name, or NAME_0, NAME_1 ...; for a single input, all there are."""
    found: dict[str, list[str]] = {}
    for spec in inputs:
        parts = [f"{spec.name}_{index}" for index in range(_num_values(spec))]
        if spec.name in header and len(parts) == 1:
            found[spec.name] = [spec.name]
        elif all(part in header for part in parts):
            found[spec.name] = parts
        elif len(inputs) == 1 and len(header) == len(parts):
            found[spec.name] = header
        else:
            wanted = spec.name if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
            more = f", or {len(parts)} column{'s' * (len(parts) > 1)} of any name" if len(inputs) == 1 else ""
            raise UsageError(
                f"{path}:1: got the column{'s' * (len(header) > 1)} {quoted(header)}; "
                f"expected '{wanted}'{more}; {takes(inputs)}"
            )
    return found


def _array_of_columns(columns: Mapping[str, Sequence[str]], numbers: Sequence[int], spec: Spec,
                      path: Path) -> np.ndarray:  # fmt: skip
    convert: Callable[..., Any] = _texts if spec.dtype == "string" else _numbers
    arrays = [convert(values, numbers, name, spec, path) for name, values in columns.items()]
    sizes = [size or 1 for size in (spec.shape or (None,))[1:]]
    if len(arrays) == 1 and not sizes:
        return arrays[0]
    table = np.stack(arrays, axis=1)
    return table.reshape(-1, *sizes) if len(arrays) == np.prod(sizes, dtype=int) else table


def _num_values(spec: Spec) -> int:
    return int(np.prod([size or 1 for size in (spec.shape or (None,))[1:]], dtype=int))


def _texts(values: Sequence[str], *_: Any) -> np.ndarray:
    return np.array(values, dtype=object)


def _numbers(values: Sequence[str], numbers: Sequence[int], name: str, spec: Spec, path: Path) -> np.ndarray:
    table = np.array(values, dtype=str)
    if spec.dtype.startswith(("int", "uint", "bool")):
        try:
            return table.astype(np.int64)  # not through floats, which hold 53 bits
        except (ValueError, OverflowError):
            pass
    try:
        return table.astype(np.float64)
    except ValueError:
        index = next(index for index, value in enumerate(values) if not _is_number(value))
        message = f"{path}:{numbers[index]}: column '{name}': got {_short(values[index])}; expected a number"
        raise UsageError(f"{message}; {takes([spec])}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
