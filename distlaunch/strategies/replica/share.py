"""Which share of the global batch a replica has, so that losses and gradients add up to exactly those of one device.

A replica's mean counts by its share of the rows (or of the mask, or of the weights) of the global batch, and gradients
are summed before anything else looks at them. Source of the rule: TensorFlow's guide to custom training with
tf.distribute.Strategy, "sum over examples / global batch size". Keras is brought to follow it by
`patches.keras_losses` and `patches.keras_gradient_sums`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from distlaunch.strategies.replica.row_random import RowPlace, numbers_for

_local = threading.local()  # replicas are traced in threads of their own


@contextlib.contextmanager
def replica_share(rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> Iterator[None]:
    """Within it, Keras losses of this replica count as `rows` of `total` examples.

    Args:
        rows: scalar float32, examples of this replica; 0 for a replica that has none (its row is a stand-in).
        total: scalar float32, examples of the global batch.
        start: scalar int64, the place of the replica's first example in it.
    """
    _local.share, _local.rows, _local.total = rows / total, rows, total
    try:
        # 1: a stand-in row is there, and it is divided by
        with numbers_for(RowPlace(start, tf.maximum(tf.cast(rows, tf.int64), 1), tf.cast(total, tf.int64))):
            yield
    finally:
        del _local.share, _local.rows, _local.total


def current_share() -> tf.Tensor | None:
    """This replica's part of the global batch, or None outside `replica_share`."""
    return getattr(_local, "share", None)


@contextlib.contextmanager
def sharing(share: tf.Tensor) -> Iterator[None]:
    """Within it, inside `replica_share`, this replica has another part: that of a mask, or of weights."""
    before = _local.share
    _local.share = share
    try:
        yield
    finally:
        _local.share = before


def global_rows() -> tf.Tensor | None:
    """Examples of the global batch, or None outside `replica_share`."""
    return getattr(_local, "total", None)


def has_rows(value: tf.Tensor) -> tf.Tensor:
    """The value, or zero in a replica whose only row is a stand-in."""
    rows = getattr(_local, "rows", None)
    return value if rows is None else tf.where(rows > 0, value, tf.zeros_like(value))
