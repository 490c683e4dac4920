"""Examples in files, as `distlaunch.data`'s helpers give them, for the input pipeline."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.data.examples.read_failures import quiet_function, reading
from distlaunch.data.examples.skipping import first_good
from distlaunch.data.files.base import IndexedFiles
from distlaunch.data.fingerprints import fingerprint, spread


class FileExamples:
    """Those of one split.

    The bytes of all of a replica's rows are read by one call of Python's; TensorFlow decodes them in its threads.

    Args:
        limit: take no more of the examples.
    """

    whole = False
    labels = None
    in_python = False

    def __init__(self, files: IndexedFiles, limit: int | None, noun: str = "example", *, skips: bool = False) -> None:
        self._files, self._noun, self._skips = files, noun, skips
        self.number = len(files) if limit is None else min(len(files), limit)

    def rows(self, indices: tf.Tensor) -> Any:
        specs = self._files.raw_spec
        call = quiet_function if self._skips else tf.numpy_function
        parts = tf.nest.flatten(call(self._read, [indices], [spec.dtype for spec in specs]))
        return tuple(tf.ensure_shape(part, [None, *spec.shape]) for part, spec in zip(parts, specs, strict=True))

    def example(self, row: Any, number_of_pass: tf.Tensor) -> Any:
        return self._files.decode(*row)

    def name(self, index: int) -> str:
        return f"{self._noun} {index} ({self._files.where(index)})"

    def describe(self) -> str:
        numbers = spread(self.number)
        read = self._files.__getitem__
        examples = [first_good(read, at, self.number) if self._skips else read(at) for at in numbers]
        spec = tf.nest.map_structure(_type, examples[0])
        return fingerprint(examples, spec, numbers, files=self._files.fingerprint())

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        with reading(keep=not self._skips):
            return self._files.read(indices)


def _type(leaf: Any) -> tf.TensorSpec:
    array = np.asarray(leaf)
    return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))
