"""`data.on_error: skip`: a training example that fails is left out, and the one after it by number takes its place.

So batches keep their size, and which examples they hold is the same for every number of workers.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.base.events import ExampleSkipped
from distlaunch.data.examples.news import tell
from distlaunch.data.examples.read_failures import explained, reading
from distlaunch.strategies.protocol import Batch
from distlaunch.strategies.replica.input import pack

_lock = threading.Lock()

_NAMED = 8
_TRIES = 16
"""Examples that may fail one after the other before one that tells what examples are like."""


def first_good(read: Callable[[int], Any], number: int, of: int) -> Any:
    """What `read` makes of an example, or of the first after it with which it does not fail."""
    tries = min(_TRIES, of)
    failure: Exception | None = None
    for further in range(tries):
        try:
            return read((number + further) % of)
        except Exception as error:
            failure = error
    message = f"{tries} examples that were tried to learn what examples are like all fail; the latest: "
    raise DataError(f"data: {message}{str(failure).removeprefix('data: ')}") from failure


class Skipping:
    """Of one split.

    Args:
        number: how many examples it has.
        one: makes the example of a row, an int64 scalar; in a graph, and eagerly.
        name: what an example is called, by its number.
        limit: different examples that may be left out.
    """

    def __init__(self, number: int, one: Callable[[tf.Tensor], Any], name: Callable[[int], str], limit: int) -> None:
        self._number, self._one, self._name, self._limit = number, one, name, limit
        # eagerly an example takes some 50 ms, and a batch may have thousands
        self._compiled = tf.function(one, input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
        self._left_out: set[int] = set()

    def load(self, rows: tf.Tensor, load: Callable[[tf.Tensor], Batch]) -> Batch:
        """What `load` makes of rows; if it fails, they are done one by one.

        Args:
            rows: int64 [n], see `Indexed`.
        """
        known = tf.numpy_function(self._instead, [rows], tf.int64)
        known.set_shape(rows.shape)
        given = tf.data.Dataset.from_tensors(known)
        at_once = given.map(load)
        specs = tf.nest.flatten(at_once.element_spec, expand_composites=False)
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            message = "got 'skip', but the examples hold ragged or sparse tensors, which are not made one by one"
            raise ConfigError(Problem(("data", "on_error"), f"{message}; write 'stop'"))

        @tf.autograph.experimental.do_not_convert
        def one_by_one(rows: tf.Tensor) -> Batch:
            leaves = tf.numpy_function(self._batch, [rows], [spec.dtype for spec in specs])
            for leaf, spec in zip(leaves, specs, strict=True):
                leaf.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(at_once.element_spec, leaves)

        # an error leaves the first dataset empty, and only then is the second asked
        either = at_once.ignore_errors().concatenate(given.map(one_by_one)).take(1)
        return pack((either.get_single_element(),))

    def _instead(self, rows: np.ndarray) -> np.ndarray:
        """The same rows; of examples that are known to fail those that take their places."""
        with _lock:
            if self._left_out.isdisjoint((rows % self._number).tolist()):
                return rows
            return np.array([self._next_good(int(row)) for row in rows], np.int64)

    def _next_good(self, row: int) -> int:
        number_of_pass, index = divmod(row, self._number)
        others = ((index + further) % self._number for further in range(self._number))
        return number_of_pass * self._number + next(other for other in others if other not in self._left_out)

    def _batch(self, rows: np.ndarray) -> list[np.ndarray]:
        examples = [tf.nest.flatten(self._example(int(row))) for row in rows]
        return [np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*examples, strict=True)]

    def _example(self, row: int) -> Any:
        while True:
            with _lock:
                row = self._next_good(row)
            wanted = tf.constant(row, tf.int64)
            with tf.device("CPU:0"), contextlib.suppress(tf.errors.OpError):
                return self._compiled(wanted)
            try:
                with tf.device("CPU:0"):
                    return self._one(wanted)  # again, for the user's line
            except Exception as error:
                index = row % self._number
                self._leave_out(index, explained(self._name(index), error))

    def _leave_out(self, index: int, failure: Exception) -> None:
        with _lock:
            if index in self._left_out:
                return
            self._left_out.add(index)
            count = len(self._left_out)
            if count <= self._limit and count < self._number:
                tell(ExampleSkipped(example=self._name(index), reason=str(failure)))
                return
            names = [self._name(index) for index in sorted(self._left_out)]
        all_of_them = ", ".join(names if len(names) <= _NAMED else [*names[:_NAMED], "..."])
        allowed = f"more than {self._limit:,} examples fail ({all_of_them}), which data.skip_limit allows"
        why = allowed if count > self._limit else "no example can be read"
        with reading():
            raise DataError(f"{why}; the latest: {str(failure).removeprefix('data: ')}")
