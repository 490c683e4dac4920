"""Compares the examples of a pipeline while they are read; before training, only the first can be compared.

A pipeline may leave the common order later: an unseeded draw, files that differ behind their beginning, threads.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import num_rows, pack
from distlaunch.data.differences import REASONS

Gather = Callable[[str], Mapping[str, str]]
"""See `Strategy.gather`."""


class RunningFingerprint:
    """A running digest of everything that was read, one number after each global batch.

    Args:
        gather: gathers a value of each process in all of them.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._after = array("I", [0])
        self._equal = 0

    def begin(self) -> None:
        """Start, or restart, at the beginning of reading."""
        self._after, self._equal = array("I", [0]), 0

    def watched(self, elements: tf.data.Dataset, glimpse: Callable[[Any], Any]) -> tf.data.Dataset:
        """Return the row sources, each recorded when it is read.

        Args:
            glimpse: returns what identifies a row source with rows, such as its first and last row.
        """

        @tf.autograph.experimental.do_not_convert
        def note(*element: Any) -> Any:
            rows = pack(element)

            def noted() -> tf.Tensor:
                return tf.numpy_function(self.note, tf.nest.flatten(glimpse(rows), expand_composites=True), tf.bool)

            # what marks an end is no batch
            known = tf.cond(num_rows(rows) > 0, noted, lambda: tf.constant(value=True))
            with tf.control_dependencies([known]):
                return tf.nest.map_structure(tf.identity, rows, expand_composites=True)

        return elements.map(note)

    def note(self, *leaves: np.ndarray) -> np.bool_:
        """Record a row source that was read, and return true.

        Args:
            leaves: the leaves of what identifies it.
        """
        value = self._after[-1]
        for leaf in map(np.asarray, leaves):  # a single text comes as bytes
            text = leaf.dtype.kind in "OS"
            value = zlib.crc32(repr(leaf.tolist()).encode() if text else leaf.tobytes(), value)
        self._after.append(value)
        return np.True_

    def compare(self, batches: int, first_step: int) -> None:
        """Compare what the processes have read so far; every process must call it.

        Args:
            first_step: at which they began.

        Raises:
            ConfigError: they have read different data.
        """
        if self._is_equal(batches):
            self._equal = batches
            return
        # numbers go on from each other, so they stay different once they are: the first is found by halving.
        # all processes see the same answers, and so ask for the same batches
        equal, different = self._equal, batches
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
        # one that has read less has come to an end where the others have not, which is reported by another name
        return self._gather(str(self._after[batches]) if batches < len(self._after) else "")
