"""Converts Arrow columns to NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from distlaunch.data.files.base import as_objects
from distlaunch.data.files.listing import data_function_error
from distlaunch.data.files.tables.base import Kind


def library() -> Any:
    """Return the module `pyarrow.parquet`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise data_function_error("Parquet files need a library: pip install 'distlaunch[parquet]'") from None
    return pyarrow.parquet


def kind_of(arrow: Any) -> Kind:
    """Return the kind of a column of an Arrow type."""
    from pyarrow import types

    # a dictionary is an encoding in the file, and not a type of the values
    if types.is_dictionary(arrow):
        return kind_of(arrow.value_type)
    if types.is_fixed_size_list(arrow):
        inner = kind_of(arrow.value_type)
        # lists of strings or of lists are not supported
        ok = inner.name != "string" and not inner.shape and " " not in inner.name
        return Kind(inner.name, (arrow.list_size,)) if ok else Kind(f"has the type {arrow}")
    if types.is_boolean(arrow):
        return Kind("bool")
    if types.is_integer(arrow) or types.is_floating(arrow):
        return Kind({"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(arrow), str(arrow)))
    is_text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_string_view)
    return Kind("string" if any(check(arrow) for check in is_text) else f"has the type {arrow}")


def as_numpy(column: Any, kind: Kind) -> tuple[np.ndarray, int | None]:
    """Return the values of a column [n, *shape], and the row of the first null that cannot be replaced, or None."""
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # returned by older versions
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kind.name == "string":
        # `large_binary`, because 32-bit offsets are limited to 2 GiB
        texts = array.cast(pa.large_binary()).to_pylist()
        return as_objects([b"" if text is None else text for text in texts]), None
    num_rows = len(array)
    if kind.shape:
        if array.null_count:
            return np.empty(0), _first_null(array)
        array = array.flatten()
    is_float = kind.name.startswith("float")
    if array.null_count and not is_float:
        return np.empty(0), _first_null(array) // int(np.prod(kind.shape, dtype=np.int64))
    values = array.to_numpy(zero_copy_only=False)  # NaN for null
    return values.astype(kind.name, copy=False).reshape(num_rows, *kind.shape), None


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
