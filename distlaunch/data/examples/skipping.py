"""`data.on_error: skip`: a training example that fails is left out, and the one after it by number takes its place.

So batches keep their size, and which examples they hold is the same for every number of workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.base.events import ExampleSkipped
from distlaunch.data.batches import Batch, num_rows
from distlaunch.data.examples.pending_events import add_event
from distlaunch.data.examples.read_failures import explained, reading

_NAMED = 8
_TRIES = 16
"""Examples that may fail one after the other before one that shows what examples are like."""


def first_good(read: Callable[[int], Any], number: int, of: int) -> Any:
    """Return the result of `read` for an example, or for the first after it that does not fail."""
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
    """The replacement of unreadable examples in one split.

    Args:
        number: number of examples of the split.
        one: makes the example of a row, an int64 scalar; in a graph, and eagerly.
        name: what an example is called, by its number.
        limit: different examples that may be left out.
    """

    def __init__(self, number: int, one: Callable[[tf.Tensor], Any], name: Callable[[int], str], limit: int) -> None:
        self._number, self._one, self._name, self._limit = number, one, name, limit
        # eagerly an example takes some 50 ms, and a batch may have thousands
        self._compiled = tf.function(one, input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
        # without a lock: what is allocated under one may collect another pass's iterator, which waits for its threads,
        # and they may wait for the lock
        self._left_out: dict[int, object] = {}

    def load(self, rows: tf.Tensor, load: Callable[[tf.Tensor], Batch]) -> Batch:
        """Return the result of `load` for rows; if it returns fewer, load them one by one.

        Args:
            rows: int64 [n], see `Indexed`.
            load: leaves out what fails.
        """
        known = tf.numpy_function(self._instead, [rows], tf.int64)
        known.set_shape(rows.shape)
        made = load(known)
        leaves = tf.nest.flatten(made, expand_composites=False)
        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            message = "got 'skip', but the examples hold ragged or sparse tensors, which are not made one by one"
            raise ConfigError(Problem(("data", "on_error"), f"{message}; write 'stop'"))

        def one_by_one() -> Batch:
            others = tf.numpy_function(self._batch, [known], [leaf.dtype for leaf in leaves])
            for other, leaf in zip(others, leaves, strict=True):
                other.set_shape(leaf.shape)
            return tf.nest.pack_sequence_as(made, others)

        return tf.cond(num_rows(made) == tf.size(known, tf.int64), lambda: made, one_by_one)

    def _instead(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows with replacements for the examples that are known to fail."""
        if self._left_out.keys().isdisjoint((rows % self._number).tolist()):
            return rows
        return np.array([self._next_good(int(row)) for row in rows], np.int64)

    def _next_good(self, row: int) -> int:
        number_of_pass, index = divmod(row, self._number)
        others = ((index + further) % self._number for further in range(self._number))
        good = next((other for other in others if other not in self._left_out), None)
        if good is None:  # another thread has reported why
            raise DataError("data: no example can be read")
        return number_of_pass * self._number + good

    def _batch(self, rows: np.ndarray) -> list[np.ndarray]:
        examples = [tf.nest.flatten(self._example(int(row))) for row in rows]
        return [np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*examples, strict=True)]

    def _example(self, row: int) -> Any:
        while True:
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
        own = object()
        if self._left_out.setdefault(index, own) is not own:
            return
        count = len(self._left_out)
        if count <= self._limit and count < self._number:
            add_event(ExampleSkipped(example=self._name(index), reason=str(failure)))
            return
        names = [self._name(number) for number in sorted(self._left_out)]
        all_of_them = ", ".join(names if len(names) <= _NAMED else [*names[:_NAMED], "..."])
        allowed = f"more than {self._limit:,} examples fail ({all_of_them}), which data.skip_limit allows"
        why = allowed if count > self._limit else "no example can be read"
        with reading():
            raise DataError(f"{why}; the latest: {str(failure).removeprefix('data: ')}")
