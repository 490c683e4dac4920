"""Reads the file of `distlaunch predict --input FILE`, and fits it to the inputs of an exported model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distlaunch.base.errors import UsageError
from distlaunch.serving.exported_model import Spec
from distlaunch.serving.fit import Arrays, fitted, quoted, takes
from distlaunch.serving.text_files import read_csv, read_jsonl, read_txt


def read_inputs(path: Path, inputs: Sequence[Spec]) -> Arrays:
    """All rows of a file, by input, in the types and shapes of the inputs.

    Raises:
        UsageError: the file cannot be read, or is not what the model takes; names file, line and column.
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
        raise UsageError(f"{path}: it holds several arrays; name it .npz")
    if len(inputs) > 1:
        raise UsageError(f"{path}: it holds one array; {takes(inputs)}; give an .npz file with an array for each")
    return {inputs[0].name: array}


def _read_npz(path: Path, inputs: Sequence[Spec]) -> dict[str, Any]:
    archive = _loaded(path)
    if isinstance(archive, np.ndarray):
        raise UsageError(f"{path}: it holds a single array; name it .npy")
    with archive:
        names = list(archive.files)
        missing = [spec.name for spec in inputs if spec.name not in names]
        if missing and len(inputs) == 1 and len(names) == 1:
            return {inputs[0].name: _member(archive, names[0], path)}
        if missing:
            raise UsageError(f"{path}: no array {quoted(missing)}; it holds {quoted(names)}; {takes(inputs)}")
        return {spec.name: _member(archive, spec.name, path) for spec in inputs}


def _loaded(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path}: {_why_not(error)}") from None
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise UsageError(f"{path}: it is damaged: {error}") from None  # of zip files


def _member(archive: Any, name: str, path: Path) -> np.ndarray:
    try:
        return archive[name]
    except OSError:
        raise
    except Exception as error:  # of zip files too
        raise UsageError(f"{path}: {name}: {_why_not(error)}") from None


def _why_not(error: Exception) -> str:
    if "pickle" in str(error).lower():
        return "it holds Python objects, or is not a NumPy file; save texts as `np.array(texts, dtype=str)`"
    return f"it is damaged: {error}"


READERS: dict[str, Callable[[Path, Sequence[Spec]], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_txt,
    ".jsonl": read_jsonl,
}
