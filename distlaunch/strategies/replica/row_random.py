"""Gives each row the random numbers that one device would draw for it, so that dropout masks do not change.

A random layer draws a tensor whose first dimension is the rows of its input. One device draws it for the global batch.
Replicas have the same seeds, so without this module each would draw the first rows of that tensor, and all would use
the same masks. Here, each replica draws the rows of the tensor that belong to its examples. TensorFlow's generator is
counter-based (Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The usual kinds of numbers
can therefore be drawn from any position, so a replica need not draw the numbers of other replicas' rows. If one device
has its rows in another order, it draws the whole tensor and gives each row the numbers for its usual position.

Tensors whose rows are not in the first dimension are the same in each replica, and for each order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_random import COUNTING, known_shape, replace_draws

_local = threading.local()  # each replica is traced in a separate thread


@dataclass(frozen=True)
class RowPlace:
    """Position of a replica's rows in the global batch; int64 scalars.

    Attributes:
        start: index of the replica's first row.
        rows: number of the replica's rows.
        total: number of rows of the global batch.
    """

    start: tf.Tensor
    rows: tf.Tensor
    total: tf.Tensor

    def draw(
        self, draw: Callable[[Any, Any], tf.Tensor], size: tf.Tensor, counter: Any, numbers_per_count: int
    ) -> tf.Tensor:
        """Return the random numbers of these rows.

        Args:
            draw: function of `(shape, counter)` that returns random numbers.
            size: shape of the result.
            counter: counter of the generator.
            numbers_per_count: how many numbers the generator makes for each value of its counter; 0 if that varies.
        """
        first, whole = self._within(size[0])
        if not numbers_per_count:
            return draw(tf.concat([[whole], size[1:]], 0), counter)[first : first + size[0]]
        before = first * tf.reduce_prod(size[1:])
        # the first row may begin in the middle of the numbers for a count
        skipped = tf.math.floormod(before, numbers_per_count)
        # this cannot overflow, because the lower half of the counter is zero for every seed
        moved = tf.bitcast(tf.bitcast(counter, tf.int64) + tf.stack([before // numbers_per_count, 0]), tf.uint64)
        flat = draw([skipped + tf.reduce_prod(size)], moved)
        return tf.reshape(flat[skipped:], size)

    def _within(self, length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return where this replica's rows begin in the tensor of one device, and the number of rows of that tensor.

        Args:
            length: length of the dimension in this replica.
        """
        entries_per_row = length // self.rows  # more than 1 if rows were merged with other dimensions
        # a dimension that does not consist of rows has the same numbers in each replica
        consists_of_rows = tf.equal(entries_per_row * self.rows, length)
        first = tf.where(consists_of_rows, entries_per_row * self.start, tf.zeros_like(length))
        return first, tf.where(consists_of_rows, entries_per_row * self.total, length)


@dataclass(frozen=True)
class RowOrder:
    """Order of the rows in a batch on one device.

    Attributes:
        rows: for each row, its index in the usual order; int64, shape [rows].
    """

    rows: tf.Tensor | tf.Variable

    def draw(
        self, draw: Callable[[Any, Any], tf.Tensor], size: tf.Tensor, counter: Any, numbers_per_count: int
    ) -> tf.Tensor:
        """Return the random numbers of these rows; see `RowPlace.draw`."""
        del numbers_per_count
        order = tf.convert_to_tensor(self.rows)
        number, entries = tf.size(order, tf.int64), tf.range(size[0])
        entries_per_row = tf.maximum(size[0] // number, 1)  # more than 1 if rows were merged with other dimensions
        consists_of_rows = tf.equal(entries_per_row * number, size[0])
        moved = (
            tf.gather(order, tf.minimum(entries // entries_per_row, number - 1)) * entries_per_row
            + entries % entries_per_row
        )
        return tf.gather(draw(size, counter), tf.where(consists_of_rows, moved, entries))


@contextlib.contextmanager
def draw_for_rows(rows: RowPlace | RowOrder) -> Iterator[None]:
    """Draw the random numbers of these rows in steps that are traced in this context, in this thread."""
    replace_draws(_replace_draw)
    before = getattr(_local, "rows", None)
    _local.rows = rows
    try:
        yield
    finally:
        _local.rows = before


def _replace_draw(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of an operation that draws random numbers."""

    def drawn(shape: Any, key: Any, counter: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        rows: RowPlace | RowOrder | None = getattr(_local, "rows", None)
        static = None if rows is None else known_shape(shape)
        # the number of rows is never known in a trace, so a known first dimension does not consist of rows
        if rows is None or static is None or not static.rank or static[0] is not None:
            return draw(shape, key, counter, *args, **kwargs)

        def draw_with_counter(shape: Any, counter: Any) -> tf.Tensor:
            return draw(shape, key, counter, *args, **kwargs)

        # Philox makes 128 bits for each count, which are four float32 or two float64
        halves = tf.as_dtype(kwargs.get("dtype", tf.float32)) == tf.float64
        numbers_per_count = (2 if halves else 4) if name in COUNTING else 0
        tensor = rows.draw(draw_with_counter, tf.cast(shape, tf.int64), counter, numbers_per_count)
        # slicing with tensors loses the static shape
        tensor.set_shape(static)
        return tensor

    return drawn
