"""What all sources of examples in files have in common."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import DataError
from distlaunch.data.files.listing import FileSet, mistake
from distlaunch.data.files.samples import hash_files

STRING = tf.TensorSpec([], tf.string)


class UnreadableRecordError(Exception):
    """One of the examples that were asked for cannot be read.

    Attributes:
        position: its place among those that were asked for.
        reason: why, in words.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


class RecordError(DataError):
    """An example cannot be read.

    Attributes:
        index: its number in the source.
        where: the file, and the place in it.
        reason: why, in words.
    """

    def __init__(self, index: int, where: str, reason: str) -> None:
        super().__init__(f"example {index:,} cannot be read ({where}): {reason}")
        self.index, self.where, self.reason = index, where, reason


class IndexedFiles(ABC):
    """Examples in files, by number.

    Threads may share one, as may forked processes.

    Attributes:
        raw_spec: what `read` returns of one example, without the dimension of the rows.
    """

    raw_spec: tuple[tf.TensorSpec, ...]

    @abstractmethod
    def __len__(self) -> int:
        """The number of examples."""

    @abstractmethod
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Reads examples; no TensorFlow in it.

        Args:
            indices: int64 [n], each from 0 to len - 1, in any order, also several times.

        Returns:
            for each of `raw_spec` an array [n, ...]; one of objects, which are `bytes`, where it says string.

        Raises:
            RecordError: an example cannot be read.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """The file of an example and the place in it, for messages. Records count from 0 in each file."""

    @abstractmethod
    def fingerprint(self) -> str:
        """The same for the same content, on any host; no times, no absolute paths.

        Raises:
            DataError: a file is gone or has another size.
        """

    def decode(self, *raw: Any) -> Any:
        """Makes an example of what `read` returns of it, with TensorFlow's operations alone."""
        return raw[0] if len(raw) == 1 else raw

    def __getitem__(self, index: int) -> Any:
        """One example, decoded, with NumPy arrays in place of tensors.

        Raises:
            IndexError: there is no such example.
            RecordError: it cannot be read or decoded.
        """
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"got example {index:,}; there are {len(self):,}")
        index %= len(self)
        raw = self.read(np.array([index], np.int64))
        try:
            # TensorFlow has strings on the CPU alone
            with tf.device("CPU:0"):
                tensors = [tf.constant(part[0], spec.dtype) for part, spec in zip(raw, self.raw_spec, strict=True)]
                example = self.decode(*tensors)
        except tf.errors.OpError as error:
            # what is wrong, without where in a graph
            reason = first_line(re.sub(r"\{\{[^}]*\}\}\s*|\s*\[Op:\w+\].*", "", error.message))
            raise RecordError(index, self.where(index), reason) from error
        return tf.nest.map_structure(
            lambda value: value.numpy() if tf.is_tensor(value) and hasattr(value, "numpy") else value, example
        )


class FilesOfRecords(IndexedFiles):
    """Examples that are counted file by file.

    Args:
        firsts: int64 [files + 1], the number of the first example of each file, and the number of all.
        noun: an example of this kind, for messages.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, files: FileSet, firsts: np.ndarray, noun: str = "a record") -> None:
        self.files, self.firsts = files, firsts
        if len(self) == 0:
            raise mistake(f"got {len(files.paths):,} files without {noun}, the first of which is {files.paths[0]}")

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of the file, and that of the record in it, of each example: int64 [n] both."""
        # "right": files without records have the same first number as the next one
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
        """As `read`. Raises UnreadableRecordError."""

    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hash_files(self.files.paths, self.files.names, self.files.sizes, len(self))


def as_objects(values: list[Any]) -> np.ndarray:
    """An array [n] of objects, whatever they are."""
    # filled afterwards: `np.array` would make an array of bytes of one width
    array = np.empty(len(values), object)
    array[:] = values
    return array


def first_line(text: object) -> str:
    """Of an error's message, what people need."""
    return (str(text).strip().splitlines() or [type(text).__name__])[0]
