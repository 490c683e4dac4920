"""Lets replicas draw the random numbers that one device would draw for their rows: dropout masks do not change.

A random layer draws a tensor whose first dimension is the rows of its input. One device draws it for the global batch.
Replicas, whose seeds are the same, would each draw the beginning of it, and so all have the same masks. Here each draws
its own rows of it. TensorFlow's generator counts (Philox, Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), so for the usual kinds of numbers nothing is drawn that is not needed.

What is drawn with the rows elsewhere than in the first dimension is the same in each replica.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import stateless_random_ops

_MODULE = stateless_random_ops.gen_stateless_random_ops_v2
_COUNTING = ("stateless_random_uniform_v2", "stateless_random_normal_v2")  # one count makes a fixed number of values
_OTHERS = (
    "stateless_truncated_normal_v2", "stateless_random_uniform_int_v2", "stateless_random_uniform_full_int_v2"
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a replica's rows are in the global batch; scalars of int64.

    Attributes:
        start: its first row.
        rows: how many its tensors have.
        total: rows of the global batch.
    """

    start: tf.Tensor
    rows: tf.Tensor
    total: tf.Tensor


def install(current: Callable[[], Place | None]) -> None:
    """Replaces TensorFlow's stateless random operations; does nothing the second time.

    Args:
        current: the place of the replica whose step is being traced; None outside of one.
    """
    if getattr(_MODULE, "_distlaunch_installed", False):
        return
    for name in (*_COUNTING, *_OTHERS):
        setattr(_MODULE, name, _of_own_rows(getattr(_MODULE, name), current, counting=name in _COUNTING))
    _MODULE._distlaunch_installed = True


def _of_own_rows(draw: Callable[..., Any], current: Callable[[], Place | None], *, counting: bool) -> Any:
    def drawn(shape: Any, key: Any, counter: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        place = current()
        static = None if place is None else tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape))
        # the number of rows is never known before the step runs; what is known is something else
        if place is None or static is None or not static.rank or static[0] is not None:
            return draw(shape, key, counter, *args, **kwargs)
        size = tf.cast(shape, tf.int64)
        first, whole = _within(size[0], place)
        if counting:
            tensor = _counted(draw, size, first, key, counter, *args, **kwargs)
        else:
            tensor = draw(tf.concat([[whole], size[1:]], 0), key, counter, *args, **kwargs)
            tensor = tensor[first : first + size[0]]
        tensor.set_shape(static)
        return tensor

    return drawn


def _within(length: tf.Tensor, place: Place) -> tuple[tf.Tensor, tf.Tensor]:
    """The first entry of a dimension in that of one device, and the length of the latter."""
    times = length // place.rows  # rows may have been merged with other dimensions
    of_rows = tf.equal(times * place.rows, length)
    first = tf.where(of_rows, times * place.start, tf.zeros_like(length))
    return first, tf.where(of_rows, times * place.total, length)


def _counted(
    draw: Callable[..., Any], size: tf.Tensor, first: tf.Tensor, key: Any, counter: Any, *args: Any, **kwargs: Any
) -> tf.Tensor:
    """Entries from `first` on, without drawing those before."""
    at_once = 2 if tf.as_dtype(kwargs.get("dtype", tf.float32)) == tf.float64 else 4
    before = first * tf.reduce_prod(size[1:])
    skipped = tf.math.floormod(before, at_once)
    # the lower half of the counter is zero for every seed, and far from its end for every size
    moved = tf.bitcast(tf.bitcast(counter, tf.int64) + tf.stack([before // at_once, 0]), tf.uint64)
    flat = draw([skipped + tf.reduce_prod(size)], key, moved, *args, **kwargs)
    return tf.reshape(flat[skipped:], size)
