"""Examples that are read by number: arrays, files, and objects with `__len__` and `__getitem__`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.base.plural import listed
from distlaunch.data.batches import Index
from distlaunch.data.examples.python_values import as_array, as_arrays
from distlaunch.data.examples.read_failures import numpy_function_without_traceback, reading
from distlaunch.data.examples.reader_pool import ReaderPool
from distlaunch.data.examples.skipping import read_first_readable
from distlaunch.data.files.base import IndexedFiles
from distlaunch.data.fingerprints import evenly_spaced, fingerprint
from distlaunch.data.structures import ArraySpec, flatten, map_structure, pack
from distlaunch.patches.tensorflow_late import is_a, not_converted, tf

_KEY = ("data", "function")
_MOST_NAMED = 12


class Arrays:
    """Arrays with an example in each row.

    Args:
        limit: largest number of examples to use; None for all.
        on_host: whether the arrays stay NumPy arrays, for `load`.
    """

    whole = True
    in_python = False

    def __init__(self, data: Any, limit: int | None, noun: str = "example", *, on_host: bool = False) -> None:
        self._noun = noun
        self._arrays, self.number = (_as_host_arrays if on_host else as_tensors)(data, limit)
        arrays = self._arrays
        self.labels = arrays[1] if isinstance(arrays, tuple) and len(arrays) > 1 else None

    @not_converted
    def rows(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, indices), self._arrays)

    def load(self, indices: np.ndarray) -> Any:
        """Return the rows of a batch as arrays."""
        return map_structure(lambda leaf: np.take(leaf, indices, 0), self._arrays)

    def example(self, row: Any, number_of_pass: Index) -> Any:
        return row

    def name(self, index: int) -> str:
        return f"{self._noun} {index}"

    def describe(self) -> str:
        numbers = evenly_spaced(self.number)
        examples = [map_structure(lambda leaf, at=at: leaf[at], self._arrays) for at in numbers]
        spec = map_structure(_spec_of_row, self._arrays)
        return fingerprint(examples, spec, numbers)


def as_tensors(data: Any, limit: int | None) -> tuple[Any, int]:
    """Return the structure with a tensor for each array, and the number of examples.

    Args:
        limit: largest number of examples to use; None for all.

    Raises:
        ConfigError: values have no rows, different numbers of rows, or a type that tensors cannot have.
    """
    data, given, arrays, number = _given_arrays(data, limit)
    with tf.device("CPU:0"):
        tensors = [_tensor(leaf, array, number) for leaf, array in zip(given, arrays, strict=True)]
    return tf.nest.pack_sequence_as(data, tensors), number


def _as_host_arrays(data: Any, limit: int | None) -> tuple[Any, int]:
    """Return the structure with a NumPy array for each array; otherwise like `as_tensors`."""
    data, given, arrays, number = _given_arrays(data, limit)
    return pack(data, [_host_array(leaf, array)[:number] for leaf, array in zip(given, arrays, strict=True)]), number


def _given_arrays(data: Any, limit: int | None) -> tuple[Any, list[Any], list[np.ndarray], int]:
    """Return the structure, its leaves as given and as arrays, and the number of examples; see `as_tensors`."""
    data = tuple(data) if isinstance(data, (tuple, list)) else data
    given = flatten(data)
    arrays = [np.asarray(leaf) for leaf in given]
    if (single := next((leaf for leaf, array in zip(given, arrays, strict=True) if array.ndim == 0), _KEY)) is not _KEY:
        raise ConfigError(Problem(_KEY, f"got {_describe_single(single)}"))
    if len({len(array) for array in arrays}) != 1:
        shapes = [array.shape for array in arrays]
        raise ConfigError(Problem(_KEY, f"the arrays differ in length: their shapes are {shapes}"))
    return data, given, arrays, len(arrays[0]) if limit is None else min(len(arrays[0]), limit)


def _describe_single(leaf: Any) -> str:
    """Describe a value without rows, and what to use instead."""
    if isinstance(leaf, Iterator):
        name = "a Python generator" if isinstance(leaf, Generator) else f"an iterator ({type(leaf).__name__})"
        hint = "tf.data.Dataset.from_generator(function, output_signature=...), or a class with __len__ and __getitem__"
        return f"{name}, which can be read only once, and not from the position of a resumed run; use {hint}"
    if isinstance(leaf, (int, float, complex, str, bytes, bool, np.generic)):
        return "single values, as Python lists have; expected arrays with an example in each row: np.array(...)"
    return f"{type(leaf).__name__}; expected arrays with rows, a tf.data.Dataset, or examples by number"


def _tensor(leaf: Any, array: np.ndarray, number: int) -> tf.Tensor:
    try:
        return tf.constant(array[:number])
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(_KEY, _describe_unsupported_array(leaf, array))) from error


def _host_array(leaf: Any, array: np.ndarray) -> np.ndarray:
    """Return the array with the values that it would have as a tensor: numbers are unchanged, text becomes bytes."""
    kind = array.dtype.kind
    if kind == "O" and all(isinstance(value, str) for value in array.flat):
        array, kind = array.astype(str), "U"
    if kind == "U":
        return np.char.encode(array, "utf-8").astype(object)
    is_text = kind == "S" or (kind == "O" and all(isinstance(value, bytes) for value in array.flat))
    is_number = kind in "biufc" and array.dtype.itemsize <= np.dtype(np.complex128).itemsize
    if not (is_text or is_number or array.dtype.type.__module__ == "ml_dtypes") or array.dtype == np.longdouble:
        raise ConfigError(Problem(_KEY, _describe_unsupported_array(leaf, array)))
    return array.astype(object) if is_text else array


def _spec_of_row(leaf: Any) -> Any:
    """Return the type of a row of an array or a tensor."""
    dtype = ArraySpec.of(leaf).dtype if isinstance(leaf, np.ndarray) else leaf.dtype.name
    return ArraySpec(tuple(leaf.shape[1:]), dtype)


def _describe_unsupported_array(leaf: Any, array: np.ndarray) -> str:
    if hasattr(leaf, "columns") and hasattr(leaf, "dtypes"):
        return _describe_data_frame(leaf)
    name = f" '{leaf.name}'" if isinstance(getattr(leaf, "name", None), str) else ""
    if array.dtype != object:
        return f"got an array{name} of {array.dtype}; expected numbers or text; convert it, for example to float32"
    kinds = sorted({type(value).__name__ for value in array.flat})
    return (
        f"got an array{name} of Python objects ({', '.join(kinds)}); expected only numbers or only text; convert it, "
        "and replace missing values"
    )


def _describe_data_frame(frame: Any) -> str:
    columns = listed([f"{name} {dtype}" for name, dtype in zip(frame.columns, frame.dtypes, strict=True)], _MOST_NAMED)
    return (
        f"got a DataFrame whose columns cannot be one array: {columns}; return dict(frame) instead, so that the "
        "model, or a keras.utils.FeatureSpace as data.preprocessing, gets each column by name, or return only "
        'numbers: frame[["a", "b"]].to_numpy("float32")'
    )


class Items:
    """Examples of a Python object with `__len__` and `__getitem__`.

    They are read in threads, of tf.data or of Python. Several threads help if reading waits for a disk or a network, or
    releases the interpreter's lock, as NumPy and image libraries do. With a pool, the pool's processes read the
    examples.

    Args:
        limit: largest number of examples to use; None for all.
        skips: whether examples may fail.
        pool: processes that read the examples, or None.
    """

    whole = False
    in_python = True
    labels = None

    def __init__(self, items: Any, limit: int | None, noun: str = "example", *, skips: bool = False,
                 pool: ReaderPool | None = None) -> None:  # fmt: skip
        self._items, self._noun, self._skips, self._pool = items, noun, skips, pool
        number = _length(items)
        self.number = number if limit is None else min(number, limit)
        if not self.number:
            raise ConfigError(Problem(_KEY, f"got {type(items).__name__} without examples; its length is 0"))
        self._spec = self._common_spec()

    def rows(self, indices: tf.Tensor) -> tf.Tensor:
        return indices

    def example(self, row: tf.Tensor, number_of_pass: Index) -> Any:
        if self._pool is not None:
            self._pool.open()
        leaves = flatten(self._spec)
        call = numpy_function_without_traceback if self._skips else tf.numpy_function
        values = tf.nest.flatten(call(self._read, [row, number_of_pass], [tf.as_dtype(leaf.dtype) for leaf in leaves]))
        for value, leaf in zip(values, leaves, strict=True):
            value.set_shape(leaf.shape)
        return pack(self._spec, values)

    def load_one(self, index: int, number_of_pass: int) -> list[np.ndarray]:
        """Return the arrays of an example, in the order of `flatten`."""
        if self._pool is not None:
            self._pool.open()
        return self._read(index, number_of_pass)

    def batch_of(self, examples: Sequence[list[np.ndarray]]) -> Any:
        """Return a batch of the results of `load_one`.

        Raises:
            DataError: the examples have different shapes.
        """
        for at, leaves in enumerate(zip(*examples, strict=True)):
            shapes = {leaf.shape: None for leaf in leaves}
            if len(shapes) > 1:
                one, other, *_ = map(list, shapes)
                message = f"value {at} of an example has shape {one}, but that of another in the batch has {other}"
                raise DataError(f"data: {message}; return examples of one shape")
        return pack(self._spec, [np.stack(leaves) for leaves in zip(*examples, strict=True)])

    def name(self, index: int) -> str:
        return f"{self._noun} {index}"

    def describe(self) -> str:
        numbers = evenly_spaced(self.number)
        return fingerprint([self._leaves(self._next_readable(at)) for at in numbers], self._spec, numbers)

    def _read(self, index: Any, number_of_pass: Any) -> list[np.ndarray]:
        number, pool = int(index), self._pool
        with reading(self.name(number), keep=not self._skips):
            item = as_arrays(self._items[number]) if pool is None else pool.read(int(number_of_pass), number)
            leaves, specs = self._leaves(item), flatten(self._spec)
            # checked here, because TensorFlow's error would not name the example
            if len(leaves) != len(specs):
                raise DataError(f"it has {len(leaves)} parts, but example 0 has {len(specs)}")
            for leaf, spec in zip(leaves, specs, strict=True):
                if not spec.is_compatible_with(leaf.shape):
                    others = f"its shape is {tuple(leaf.shape)}, but the shape of other examples is {spec.shape}"
                    hint = "return examples of one shape, for instance by resizing them in __getitem__"
                    raise DataError(f"{others}; {hint}")
            return [_cast(leaf, spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)]

    def _item(self, number: int) -> Any:
        with reading(self.name(number), keep=False):
            return as_arrays(self._items[number])

    def _next_readable(self, number: int) -> Any:
        """Return an item. If examples may fail and this one fails, return the next one that can be read."""
        return read_first_readable(self._item, number, self.number) if self._skips else self._item(number)

    @staticmethod
    def _leaves(item: Any) -> list[np.ndarray]:
        return [as_array(leaf) for leaf in flatten(item)]

    def _common_spec(self) -> Any:
        """Return the common spec of the first, middle and last example; sizes that differ are None."""
        # reading all examples may take long; an example of another shape is reported when it is read
        first, *others = (self._read_checked(number) for number in sorted({0, self.number // 2, self.number - 1}))
        spec = [ArraySpec.of(leaf) for leaf in first[1]]
        for _, leaves in others:
            if len(leaves) != len(spec):
                message = f"the examples differ in structure: {len(spec)} parts in the first, {len(leaves)} in another"
                raise ConfigError(Problem(_KEY, message))
            spec = [_common_spec_of(one, leaf) for one, leaf in zip(spec, leaves, strict=True)]
        return pack(first[0], spec)

    def _read_checked(self, number: int) -> tuple[Any, list[np.ndarray]]:
        item = self._next_readable(number)
        leaves = self._leaves(item)
        for leaf in leaves:
            if leaf.dtype == object and not all(isinstance(value, (str, bytes)) for value in leaf.flat):
                kinds = sorted({type(value).__name__ for value in leaf.flat})
                message = f"example {number} contains {', '.join(kinds)}; expected numbers, text and arrays of them"
                raise ConfigError(Problem(_KEY, message))
        return item, leaves


def gives_items(value: Any) -> bool:
    """Return whether an object returns examples by number, and is not an array or a structure of arrays."""
    if isinstance(value, (np.ndarray, tuple, list, str, bytes, Mapping)) or is_a(value, "data.Dataset", "Tensor"):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not hasattr(value, "columns")


def _length(items: Any) -> int:
    try:
        number = len(items)
    except (TypeError, OverflowError) as error:
        raise ConfigError(Problem(_KEY, f"got {type(items).__name__}, whose length cannot be read: {error}")) from None
    if number >= sys.maxsize:
        message = f"got an endless {type(items).__name__}; remove the repetition, since `train.epochs` repeats the data"
        raise ConfigError(Problem(_KEY, message))
    return number


def _common_spec_of(spec: ArraySpec, leaf: np.ndarray) -> ArraySpec:
    if spec.dtype != ArraySpec.of(leaf).dtype:
        message = f"the examples differ in type: {spec.dtype} in the first, {leaf.dtype} in another"
        raise ConfigError(Problem(_KEY, message))
    return spec.joined(leaf.shape)


def _cast(leaf: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "string":
        return leaf.astype(object)
    wanted = np.dtype(dtype)
    if leaf.dtype != wanted and not np.can_cast(leaf.dtype, wanted, "same_kind"):
        raise DataError(f"it has {leaf.dtype} where example 0 has {dtype}")
    return leaf.astype(wanted, copy=False)


class FileExamples:
    """Examples in files.

    One Python call reads the bytes of all rows of a replica. TensorFlow decodes them in its threads, if that is needed.

    Args:
        limit: largest number of examples to use; None for all.
        skips: whether examples may fail.
    """

    whole = False
    labels = None
    in_python = False

    def __init__(self, files: IndexedFiles, limit: int | None, noun: str = "example", *, skips: bool = False) -> None:
        self._files, self._noun, self._skips = files, noun, skips
        self.number = len(files) if limit is None else min(len(files), limit)

    def load(self, indices: np.ndarray) -> Any:
        """Return the rows of a batch as arrays, from files that need no TensorFlow to decode them."""
        return self._files.decode(*self._read(indices))

    def rows(self, indices: tf.Tensor) -> Any:
        specs = self._files.raw_spec
        call = numpy_function_without_traceback if self._skips else tf.numpy_function
        parts = tf.nest.flatten(call(self._read, [indices], [spec.dtype for spec in specs]))
        return tuple(tf.ensure_shape(part, [None, *spec.shape]) for part, spec in zip(parts, specs, strict=True))

    def example(self, row: Any, number_of_pass: Index) -> Any:
        return self._files.decode(*row)

    def name(self, index: int) -> str:
        return f"{self._noun} {index} ({self._files.where(index)})"

    def describe(self) -> str:
        numbers = evenly_spaced(self.number)
        read = self._files.__getitem__
        examples = [read_first_readable(read, at, self.number) if self._skips else read(at) for at in numbers]
        spec = map_structure(lambda leaf: ArraySpec.of(np.asarray(leaf)), examples[0])
        return fingerprint(examples, spec, numbers, files=self._files.fingerprint())

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        with reading(keep=not self._skips):
            return self._files.read(indices)
