"""`data.on_error: skip`: skips training examples that fail, and uses the next example by number instead.

So batches keep their size, and have the same examples for every number of workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.base.events import ExampleSkipped
from distlaunch.data.batches import Batch, num_rows
from distlaunch.data.examples.pending_events import add_event
from distlaunch.data.examples.read_failures import explain, reading
from distlaunch.patches.tensorflow_late import tf

_NAMED = 8
_TRIES = 16
"""Number of consecutive examples that may fail when the type of the examples is determined."""


def read_first_readable(read: Callable[[int], Any], number: int, of: int) -> Any:
    """Return the result of `read` for an example, or for the first one after it that does not fail."""
    tries = min(_TRIES, of)
    failure: Exception | None = None
    for further in range(tries):
        try:
            return read((number + further) % of)
        except Exception as error:
            failure = error
    message = f"all of the {tries} examples that were read to determine their type fail; the last error: "
    raise DataError(f"data: {message}{str(failure).removeprefix('data: ')}") from failure


class Skipping:
    """Replaces examples of a split that cannot be read.

    Args:
        number: number of examples of the split.
        name: returns the name of an example, given its index.
        limit: number of different examples that may be skipped.
    """

    def __init__(self, number: int, name: Callable[[int], str], limit: int) -> None:
        self._number, self._name, self._limit = number, name, limit
        # Not protected by a lock: an allocation while it is held may trigger garbage collection of another pass's
        # iterator. The collection waits for the iterator's threads, which may wait for the lock.
        self._skipped: dict[int, object] = {}

    def read(self, row: int, read: Callable[[int, int], Any]) -> Any:
        """Return the result of `read` for the example of a row, or for the first one after it that does not fail.

        Args:
            row: see `Indexed`.
            read: function of the index of the example and the index of the pass.
        """
        while True:
            row = self._next_readable(row)
            number_of_pass, index = divmod(row, self._number)
            try:
                return read(index, number_of_pass)
            except Exception as error:
                self._skip(index, explain(self._name(index), error))

    def _next_readable(self, row: int) -> int:
        number_of_pass, index = divmod(row, self._number)
        others = ((index + further) % self._number for further in range(self._number))
        good = next((other for other in others if other not in self._skipped), None)
        if good is None:  # another thread has reported the reason
            raise DataError("data: no example can be read")
        return number_of_pass * self._number + good

    def _skip(self, index: int, failure: Exception) -> None:
        own = object()
        if self._skipped.setdefault(index, own) is not own:
            return
        count = len(self._skipped)
        if count <= self._limit and count < self._number:
            add_event(ExampleSkipped(example=self._name(index), reason=str(failure)))
            return
        names = [self._name(number) for number in sorted(self._skipped)]
        shown_names = ", ".join(names if len(names) <= _NAMED else [*names[:_NAMED], "..."])
        allowed = f"more examples fail ({shown_names}) than data.skip_limit allows ({self._limit:,})"
        why = allowed if count > self._limit else "no example can be read"
        with reading():
            raise DataError(f"{why}; the last error: {str(failure).removeprefix('data: ')}")


class GraphSkipping(Skipping):
    """Replaces examples in an input pipeline of TensorFlow.

    Args:
        number: number of examples of the split.
        one: returns the example of a row, an int64 scalar, in a graph or eagerly.
        name: returns the name of an example, given its index.
        limit: number of different examples that may be skipped.
    """

    def __init__(self, number: int, one: Callable[[tf.Tensor], Any], name: Callable[[int], str], limit: int) -> None:
        super().__init__(number, name, limit)
        self._one = one
        # compiled, because eagerly an example takes about 50 ms, and a batch may have thousands
        self._compiled = tf.function(one, input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)

    def load(self, rows: tf.Tensor, load: Callable[[tf.Tensor], Batch]) -> Batch:
        """Return the batch of `load` for these rows; if `load` leaves out some rows, read and replace them one by one.

        Args:
            rows: int64 [n], see `Indexed`.
            load: returns a batch of rows, without those that fail.
        """
        known = tf.numpy_function(self._replace_known_failures, [rows], tf.int64)
        known.set_shape(rows.shape)
        made = load(known)
        leaves = tf.nest.flatten(made, expand_composites=False)
        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            message = "got 'skip', but the examples have ragged or sparse tensors, which cannot be replaced one by one"
            raise ConfigError(Problem(("data", "on_error"), f"{message}; write 'stop'"))

        def one_by_one() -> Batch:
            others = tf.numpy_function(self._batch, [known], [leaf.dtype for leaf in leaves])
            for other, leaf in zip(others, leaves, strict=True):
                # eagerly, `made` has fewer rows than the replacement
                other.set_shape(tf.TensorShape([None]).concatenate(leaf.shape[1:]))
            return tf.nest.pack_sequence_as(made, others)

        return tf.cond(num_rows(made) == tf.size(known, tf.int64), lambda: made, one_by_one)

    def _replace_known_failures(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows with replacements for the examples that are known to fail."""
        if self._skipped.keys().isdisjoint((rows % self._number).tolist()):
            return rows
        return np.array([self._next_readable(int(row)) for row in rows], np.int64)

    def _batch(self, rows: np.ndarray) -> list[np.ndarray]:
        examples = [tf.nest.flatten(self._example(int(row))) for row in rows]
        return [np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*examples, strict=True)]

    def _example(self, row: int) -> Any:
        while True:
            row = self._next_readable(row)
            wanted = tf.constant(row, tf.int64)
            with tf.device("CPU:0"), contextlib.suppress(tf.errors.OpError):
                return self._compiled(wanted)
            try:
                with tf.device("CPU:0"):
                    return self._one(wanted)  # eagerly, for an error with the line of the user's code
            except Exception as error:
                index = row % self._number
                self._skip(index, explain(self._name(index), error))
