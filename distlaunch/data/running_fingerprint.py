"""Compares the examples of a pipeline between processes while they are read.

Before training, only the first examples can be compared. Later ones may differ because of random numbers without a
seed, of files that differ after their beginning, or of threads.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import num_rows, pack
from distlaunch.data.differences import REASONS
from distlaunch.patches.tensorflow_late import not_converted, tf

Gather = Callable[[str], Mapping[str, str]]
"""See `Strategy.gather`."""


class RunningFingerprint:
    """Running digest of all global batches that were read, with one value after each batch.

    Args:
        gather: makes each process's value available to all processes.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._digests = array("I", [0])
        self._num_equal = 0

    def begin(self) -> None:
        """Reset the digest, at the beginning of reading."""
        self._digests, self._num_equal = array("I", [0]), 0

    def record_reads(self, elements: tf.data.Dataset, identify: Callable[[Any], Any]) -> tf.data.Dataset:
        """Return the same dataset; each element (the rows of a batch) is added to the digest when it is read.

        Args:
            identify: returns tensors that identify an element, such as its first and last row.
        """

        @not_converted
        def record(*element: Any) -> Any:
            rows = pack(element)

            def remember_rows() -> tf.Tensor:
                return tf.numpy_function(self.record, tf.nest.flatten(identify(rows), expand_composites=True), tf.bool)

            # an element without rows marks an end and is not a batch
            known = tf.cond(num_rows(rows) > 0, remember_rows, lambda: tf.constant(value=True))
            with tf.control_dependencies([known]):
                return tf.nest.map_structure(tf.identity, rows, expand_composites=True)

        return elements.map(record)

    def record(self, *leaves: np.ndarray) -> np.bool_:
        """Add an element to the digest, and return true.

        Args:
            leaves: arrays that identify the element.
        """
        value = self._digests[-1]
        for leaf in map(np.asarray, leaves):  # a scalar string is passed as bytes
            text = leaf.dtype.kind in "OS"
            value = zlib.crc32(repr(leaf.tolist()).encode() if text else leaf.tobytes(), value)
        self._digests.append(value)
        return np.True_

    def compare(self, batches: int, first_step: int) -> None:
        """Compare the batches that the processes have read so far; every process must call it.

        Args:
            batches: number of batches to compare.
            first_step: step at which the processes began to read.

        Raises:
            ConfigError: they have read different data.
        """
        if self._is_equal(batches):
            self._num_equal = batches
            return
        # Each value depends on the previous one, so values stay different after the first difference, which is found by
        # bisection. All processes get the same answers, so they compare the same batches.
        equal, different = self._num_equal, batches
        while different - equal > 1:
            middle = (equal + different) // 2
            equal, different = (middle, different) if self._is_equal(middle) else (equal, middle)
        gathered = self._gathered(different)
        others = sorted(task for task, value in gathered.items() if value != gathered[min(gathered)])
        message = f"{', '.join(others)} and {min(gathered)} have read different training data since step"
        raise ConfigError(Problem(("data",), f"{message} {first_step + different}; {REASONS}"))

    def _is_equal(self, batches: int) -> bool:
        return len(set(self._gathered(batches).values())) == 1

    def _gathered(self, batches: int) -> Mapping[str, str]:
        # a process that has read fewer batches is reported elsewhere, as data that ends too early
        return self._gather(str(self._digests[batches]) if batches < len(self._digests) else "")
