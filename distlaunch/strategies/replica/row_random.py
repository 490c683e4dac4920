"""Gives each row the random numbers that one device would draw for it, so that dropout masks do not change.

A random layer draws a tensor whose first dimension is the rows of its input. One device draws it for the global batch.
Replicas, which have the same seeds, would each draw the beginning of it, and so use the same masks. Here each replica
draws its own rows of the tensor. TensorFlow's generator is counter-based (Philox, Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), so that for the usual kinds of numbers nothing is drawn in vain. One device whose rows
are in another order draws as always, and gives each row the numbers that it has in the usual order.

Numbers with the rows in another dimension than the first are the same in each replica, and in each order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from distlaunch.patches.tensorflow_random import COUNTING, known_shape, replace_draws

_local = threading.local()  # each replica is traced in a separate thread


@dataclass(frozen=True)
class RowPlace:
    """Position of a replica's rows in the global batch; int64 scalars.

    Attributes:
        start: index of its first row.
        rows: number of rows of its tensors.
        total: number of rows of the global batch.
    """

    start: tf.Tensor
    rows: tf.Tensor
    total: tf.Tensor

    def draw(self, draw: Callable[[Any, Any], tf.Tensor], size: tf.Tensor, counter: Any, at_once: int) -> tf.Tensor:
        """Return the random numbers of these rows.

        Args:
            draw: maps `(shape, counter)` to numbers.
            size: shape of the result.
            at_once: how many numbers one count produces; 0 if that is not fixed.
        """
        first, whole = self._within(size[0])
        if not at_once:
            return draw(tf.concat([[whole], size[1:]], 0), counter)[first : first + size[0]]
        before = first * tf.reduce_prod(size[1:])
        # the generator makes `at_once` numbers per count, so a row may begin in the middle of them
        skipped = tf.math.floormod(before, at_once)
        # the lower half of the counter is zero for every seed, and does not overflow for any size
        moved = tf.bitcast(tf.bitcast(counter, tf.int64) + tf.stack([before // at_once, 0]), tf.uint64)
        flat = draw([skipped + tf.reduce_prod(size)], moved)
        return tf.reshape(flat[skipped:], size)

    def _within(self, length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the index in one device's dimension at which this replica's begins, and the length of the former."""
        times = length // self.rows  # rows may have been merged with other dimensions
        of_rows = tf.equal(times * self.rows, length)
        # otherwise the first dimension is unrelated to rows, and each replica draws the same numbers
        first = tf.where(of_rows, times * self.start, tf.zeros_like(length))
        return first, tf.where(of_rows, times * self.total, length)


@dataclass(frozen=True)
class RowOrder:
    """Order of the rows in a batch on one device.

    Attributes:
        rows: for each row, its index in the usual order; int64, shape [rows].
    """

    rows: tf.Tensor | tf.Variable

    def draw(self, draw: Callable[[Any, Any], tf.Tensor], size: tf.Tensor, counter: Any, at_once: int) -> tf.Tensor:
        """Return the random numbers of these rows; see `RowPlace.draw`."""
        del at_once
        order = tf.convert_to_tensor(self.rows)
        number, entries = tf.size(order, tf.int64), tf.range(size[0])
        times = tf.maximum(size[0] // number, 1)  # rows may have been merged with other dimensions
        of_rows = tf.equal(times * number, size[0])
        moved = tf.gather(order, tf.minimum(entries // times, number - 1)) * times + entries % times
        # all numbers are drawn, since one device has all rows
        return tf.gather(draw(size, counter), tf.where(of_rows, moved, entries))


@contextlib.contextmanager
def numbers_for(rows: RowPlace | RowOrder) -> Iterator[None]:
    """Draw the random numbers of these rows in steps that are traced in this context, in this thread."""
    replace_draws(_of_own_rows)
    before = getattr(_local, "rows", None)
    _local.rows = rows
    try:
        yield
    finally:
        _local.rows = before


def _of_own_rows(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of an operation that draws random numbers."""

    def drawn(shape: Any, key: Any, counter: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        rows: RowPlace | RowOrder | None = getattr(_local, "rows", None)
        static = None if rows is None else known_shape(shape)
        # the number of rows is never static, so a static first dimension is something else
        if rows is None or static is None or not static.rank or static[0] is not None:
            return draw(shape, key, counter, *args, **kwargs)

        def of_counter(shape: Any, counter: Any) -> tf.Tensor:
            return draw(shape, key, counter, *args, **kwargs)

        # one count of Philox is 128 bits: four float32, or two float64
        halves = tf.as_dtype(kwargs.get("dtype", tf.float32)) == tf.float64
        at_once = (2 if halves else 4) if name in COUNTING else 0
        tensor = rows.draw(of_counter, tf.cast(shape, tf.int64), counter, at_once)
        # slicing with tensors loses the static shape
        tensor.set_shape(static)
        return tensor

    return drawn
