"""Base classes of all sources of examples in files."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from distlaunch.base.errors import DataError
from distlaunch.data.files.listing import FileSet, data_function_error
from distlaunch.data.files.samples import hash_files
from distlaunch.data.structures import ArraySpec, map_structure
from distlaunch.patches.tensorflow_late import tf

STRING = ArraySpec((), "string")


class UnreadableRecordError(Exception):
    """A requested example cannot be read.

    Attributes:
        position: index of the example among the requested ones.
        reason: the reason, in words.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


class RecordError(DataError):
    """An example cannot be read.

    Attributes:
        index: index of the example in the source.
        where: the file and the position in it.
        reason: the reason, in words.
    """

    def __init__(self, index: int, where: str, reason: str) -> None:
        super().__init__(f"example {index:,} cannot be read ({where}): {reason}")
        self.index, self.where, self.reason = index, where, reason


class IndexedFiles(ABC):
    """Examples in files, by number.

    Threads and forked processes may share an object.

    Attributes:
        raw_types: types of the arrays that `read` returns, for one example. A class of a user sets `raw_spec` instead.
    """

    raw_types: tuple[ArraySpec, ...]

    @functools.cached_property
    def raw_spec(self) -> tuple[tf.TensorSpec, ...]:
        """Type specs of the arrays that `read` returns, for one example."""
        return tuple(each.tensor_spec() for each in self.raw_types)

    @property
    def decodes_with_tensorflow(self) -> bool:
        """Whether `decode` calls operations of TensorFlow, so that its arguments must be tensors."""
        return type(self).decode is not IndexedFiles.decode

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @abstractmethod
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Read examples, without TensorFlow.

        Args:
            indices: int64 [n], from 0 to len - 1, in any order; an index may occur several times.

        Returns:
            An array [n, ...] for each value of an example; for strings, an array of `bytes` objects.

        Raises:
            RecordError: an example cannot be read.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """Return the file and position of an example, for messages. Records are counted from 0 in each file."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest that is equal on all hosts for equal content; it includes no times and no absolute paths.

        Raises:
            DataError: a file does not exist any longer, or has another size.
        """

    def decode(self, *raw: Any) -> Any:
        """Decode an example from the result of `read`, with operations of TensorFlow only.

        If `decodes_with_tensorflow` is false, the arguments may also be the arrays of several examples.
        """
        return raw[0] if len(raw) == 1 else raw

    def __getitem__(self, index: int) -> Any:
        """Return one decoded example, with NumPy arrays in place of tensors.

        Raises:
            IndexError: there is no such example.
            RecordError: the example cannot be read or decoded.
        """
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"got example {index:,}; there are {len(self):,}")
        index %= len(self)
        raw = self.read(np.array([index], np.int64))
        if not self.decodes_with_tensorflow:
            return self.decode(*(part[0] for part in raw))
        try:
            # TensorFlow has strings on the CPU only
            with tf.device("CPU:0"):
                tensors = [tf.constant(part[0], spec.dtype) for part, spec in zip(raw, self.raw_spec, strict=True)]
                example = self.decode(*tensors)
        except tf.errors.OpError as error:
            # without the names of graph nodes
            reason = first_line(re.sub(r"\{\{[^}]*\}\}\s*|\s*\[Op:\w+\].*", "", error.message))
            raise RecordError(index, self.where(index), reason) from error
        return map_structure(
            lambda value: value.numpy() if tf.is_tensor(value) and hasattr(value, "numpy") else value, example
        )


class FilesOfRecords(IndexedFiles):
    """Examples that are numbered file by file.

    Args:
        firsts: int64 [files + 1], the index of the first example of each file, and at the end the total number of
            examples.
        noun: word for an example in messages.

    Raises:
        ConfigError: there are no examples.
    """

    def __init__(self, files: FileSet, firsts: np.ndarray, noun: str = "a record") -> None:
        self.files, self.firsts = files, firsts
        if len(self) == 0:
            raise data_function_error(f"got {len(files.paths):,} files without {noun}; the first is {files.paths[0]}")

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each example, the index of its file and of its record within the file; both int64 [n]."""
        # "right" skips files without records, whose first index is that of the next file
        file_ids = np.searchsorted(self.firsts, indices, side="right") - 1
        return file_ids, indices - self.firsts[file_ids]

    def where(self, index: int) -> str:
        file_ids, records = self.locate(np.array([index], np.int64))
        return f"{self.files.paths[file_ids[0]]}, record {records[0]:,}"

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        indices = np.asarray(indices, np.int64)
        assert not indices.size or (indices.min() >= 0 and indices.max() < len(self)), "indices of examples"
        try:
            return self._read(indices)
        except UnreadableRecordError as error:
            index = int(indices[error.position])
            raise RecordError(index, self.where(index), error.reason) from error

    @abstractmethod
    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Read examples for `read`.

        Raises:
            UnreadableRecordError: an example cannot be read.
        """

    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hash_files(self.files.paths, self.files.names, self.files.sizes, len(self))


def as_objects(values: list[Any]) -> np.ndarray:
    """Return an array [n] of objects of any type."""
    # assigned, because `np.array` would make an array of bytes of fixed length
    array = np.empty(len(values), object)
    array[:] = values
    return array


def first_line(text: object) -> str:
    """Return the first line of an error's message."""
    return (str(text).strip().splitlines() or [type(text).__name__])[0]
