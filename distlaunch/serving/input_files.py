"""Reads the file of `distlaunch predict --input FILE`, and converts it to the inputs of an exported model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distlaunch.base.errors import UsageError
from distlaunch.serving.exported_model import ANY, Spec, adapted, dtype_name

Arrays = dict[str, np.ndarray]
_LONGEST = 40  # characters of a value in a message
_INEXACT = 2.0**53
"""The smallest float that may stand for several integers."""


def read_inputs(path: Path, inputs: Sequence[Spec]) -> Arrays:
    """Read all rows of a file, and return an array for each input, in its type and shape.

    Raises:
        UsageError: the file cannot be read or does not fit the model; the message names file, line and column.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UsageError(f"{path}: got '{path.suffix}'; expected a file that ends in {', '.join(READERS)}")
    try:
        values = reader(path, inputs)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    return fitted(values, inputs, str(path))


def _read_npy(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    array = _loaded(path)
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path}: it contains several arrays; name it .npz")
    if len(inputs) > 1:
        raise UsageError(f"{path}: it contains one array; {takes(inputs)}; use an .npz file with an array for each")
    return {inputs[0].name: array}


def _read_npz(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    archive = _loaded(path)
    if isinstance(archive, np.ndarray):
        raise UsageError(f"{path}: it contains a single array; name it .npy")
    with archive:
        names = list(archive.files)
        missing = [spec.name for spec in inputs if spec.name not in names]
        if missing and len(inputs) == 1 and len(names) == 1:
            return {inputs[0].name: _member(archive, names[0], path)}
        if missing:
            raise UsageError(f"{path}: no array {quoted(missing)}; it contains {quoted(names)}; {takes(inputs)}")
        return {spec.name: _member(archive, spec.name, path) for spec in inputs}


def _loaded(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path}: {_why_not(error)}") from None
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise UsageError(f"{path}: it is damaged: {error}") from None  # errors of zip files


def _member(archive: Any, name: str, path: Path) -> np.ndarray:
    try:
        return archive[name]
    except OSError:
        raise
    except Exception as error:  # includes errors of zip files
        raise UsageError(f"{path}: {name}: {_why_not(error)}") from None


def _why_not(error: Exception) -> str:
    if "pickle" in str(error).lower():
        return "it contains Python objects, or is not a NumPy file; save texts as `np.array(texts, dtype=str)`"
    return f"it is damaged: {error}"


def fitted(values: Mapping[str, Any], inputs: Sequence[Spec], where: str) -> Arrays:
    """Convert values to the inputs' types and shapes.

    Raises:
        UsageError: they do not fit; the message begins with `where`.
    """
    arrays = {spec.name: _fit(np.asarray(values[spec.name]), spec, where) for spec in inputs}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"{where}: the inputs differ in their number of rows: {listed}")
    if 0 in lengths.values():
        raise UsageError(f"{where}: it contains no rows")
    return arrays


def takes(inputs: Sequence[Spec]) -> str:
    """Describe the inputs of a model: `the model takes x: float32[?,10]`."""
    return "the model takes " + ", ".join(f"{spec.name}: {spec.kind}" for spec in inputs)


def quoted(names: Any) -> str:
    parts = [f"'{name}'" for name in names]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:8], f"... ({len(parts)} in all)"])


def _fit(array: np.ndarray, spec: Spec, where: str) -> np.ndarray:
    got = f"{where}: {spec.name}: got {dtype_name(array)}[{','.join(map(str, array.shape))}]"
    if array.ndim == 0:
        raise UsageError(f"{got}, a single value; expected rows; {takes([spec])}")
    text = array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and all(isinstance(v, (str, bytes)) for v in array.flat)
    )
    if not text and array.dtype.kind not in "biuf" and dtype_name(array) != "bfloat16":
        raise UsageError(f"{where}: {spec.name}: got neither numbers nor text; {takes([spec])}")
    if spec.dtype != ANY and text != (spec.dtype == "string"):
        raise UsageError(f"{got}; {takes([spec])}")
    if not text and spec.dtype != ANY:
        _check_range(array, spec, where)
    array = adapted(_encoded(array) if text else array, spec)
    sizes = array.shape if spec.shape is None else spec.shape
    if array.ndim != len(sizes) or any(
        size is not None and size != own for size, own in zip(sizes[1:], array.shape[1:], strict=True)
    ):
        raise UsageError(f"{got}; {takes([spec])}")
    return array


def _check_range(array: np.ndarray, spec: Spec, where: str) -> None:
    """Raise UsageError for numbers that the input's type cannot represent."""
    if (allowed := _allowed_integers(spec)) is None:
        return
    if array.dtype.kind in "biu":
        wrong = (array < allowed[0]) | (array > allowed[-1])
    else:
        # `astype` would wrap and truncate them silently
        values = array.astype(np.float64)
        wrong = (values < allowed[0]) | (values > allowed[-1]) | (values != np.trunc(values))
        wrong |= abs(values) >= _INEXACT
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        place = f"row {at[0]}" + (f", at {list(at[1:])}" if at[1:] else "")
        raise UsageError(f"{where}: {spec.name}: {place}: got {array[at]}; {_expected(array[at].item(), spec)}")


def _allowed_integers(spec: Spec) -> range | None:
    """Return the integers that an input can have; None if its type is not an integer type."""
    if not spec.dtype.startswith(("int", "uint")):
        return None
    limits = np.iinfo(spec.dtype)
    return range(limits.min, limits.max + 1)


def _as_integer(number: float, allowed: range) -> int | None:
    """Return a whole number as an integer, or None if it is not whole, not exact or not allowed."""
    if isinstance(number, float) and (not number.is_integer() or abs(number) >= _INEXACT):
        return None
    return int(number) if int(number) in allowed else None


def _expected(got: float, spec: Spec) -> str:
    """Return the words that follow a number that an input of integers cannot have."""
    limits = np.iinfo(spec.dtype)
    text = f"expected whole numbers from {limits.min} to {limits.max} ({spec.dtype})"
    if isinstance(got, float) and _INEXACT <= abs(got) < np.inf:
        return f"{text}; floats from 2**53 on are not exact, so give integers"
    return text


def _encoded(array: np.ndarray) -> np.ndarray:
    flat = [value.encode() if isinstance(value, str) else value for value in array.reshape(-1).tolist()]
    # not `np.array(flat)`: its fixed-width bytes would lose zeros at the end
    encoded = np.empty(len(flat), dtype=object)
    encoded[:] = flat
    return encoded.reshape(array.shape)


def _read_txt(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """Read one text per line."""
    if len(inputs) > 1 or inputs[0].dtype not in ("string", ANY):
        raise UsageError(f"{path}: a .txt file has one text per line; {takes(inputs)}")
    return {inputs[0].name: np.array(_lines(path), dtype=object)}


def read_jsonl(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """Read one row per line: an object with a value for each input, or the value of the only one."""
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


def _read_csv(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    """Read columns by name, after a line that names them; values in a .tsv file are not quoted."""
    # Python's limit of 128 KiB is too low for texts; 2**31 - 1 is the highest limit that fits a C long on every system
    csv.field_size_limit(2**31 - 1)
    options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {"strict": True}
    texts = _lines(path)
    # with line ends, since a quoted field may contain them
    reader = csv.reader((f"{text}\n" for text in texts), **options)
    rows, numbers = [], []
    try:
        for row in reader:
            if row:
                rows.append(row)
                # the number of its last line; a row with quoted line ends has several
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
        raise UsageError(f"{path}:1: several columns are named {quoted(repeated)}")
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != len(header):
            raise UsageError(f"{path}:{number}: got {len(row)} values; expected {len(header)}, one for each column")
    chosen = _columns(header, inputs, path)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
    return {
        spec.name: _array_of_columns({name: columns[name] for name in chosen[spec.name]}, numbers, spec, path)
        for spec in inputs
    }


def _lines(path: Path) -> list[str]:
    """Return lines without their ends, including blank ones, but no empty line after the last line end."""
    # the byte order mark that Windows programs write
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
            raise UsageError(f"{path}:{number}: {spec.name}: got {_short(row)} [{shape}], unlike in the lines before; "
                             f"{takes([spec])}")  # fmt: skip
    array = np.array(rows, dtype=object if isinstance(rows[0], str) else None)
    allowed = _allowed_integers(spec)
    if allowed is None or array.dtype.kind != "f":
        return array

    def as_integers(value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [as_integers(part, number) for part in value]
        if (integer := _as_integer(value, allowed)) is None:
            raise UsageError(f"{path}:{number}: {spec.name}: got {_short(value)}; {_expected(value, spec)}")
        return integer

    # again, because NumPy makes floats of all numbers if some are floats, or if some are above the range of int64
    return np.array([as_integers(row, number) for number, row in enumerate(rows, 1)], dtype=spec.dtype)


def _columns(header: list[str], inputs: Sequence[Spec], path: Path) -> dict[str, list[str]]:
    """Return the columns of each input: the one with its name, or NAME_0, NAME_1 ...; or all for a single input."""
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
    def got(index: int) -> str:
        return f"{path}:{numbers[index]}: column '{name}': got {_short(values[index])}"

    allowed = _allowed_integers(spec)
    convert = float if allowed is None else _number
    try:
        found = [convert(value) for value in values]
    except ValueError:
        index = next(index for index, value in enumerate(values) if not _is_number(value))
        raise UsageError(f"{got(index)}; expected a number; {takes([spec])}") from None
    if allowed is None:
        return np.array(found, np.float64)
    integers = [_as_integer(number, allowed) for number in found]
    if None in integers:
        index = integers.index(None)
        raise UsageError(f"{got(index)}; {_expected(found[index], spec)}")
    return np.array(integers, dtype=spec.dtype)


def _number(text: str) -> int | float:
    """Return an integer if possible, because floats have only 53 bits."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


READERS: dict[str, Callable[[Path, Sequence[Spec]], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_txt,
    ".jsonl": read_jsonl,
}
