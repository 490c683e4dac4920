"""In a graph: what replicas must agree upon before a step, where each process knows its own data alone.

Each is one small all-reduce, and is made only where it is needed.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from typing import Any

import tensorflow as tf


@tf.autograph.experimental.do_not_convert
def ended_anywhere(strategy: Any, ended: tf.Tensor) -> tf.Tensor:
    """Whether the data of any process has ended; asked before each step where lengths are not known."""

    def local() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(ended, tf.float32))

    return strategy.experimental_local_results(strategy.run(local))[0] > 0


@tf.autograph.experimental.do_not_convert
def counted(strategy: Any, element: Any) -> Any:
    """An element of this process's own rows, with `total` and `start` as of the global batch of all processes.

    Args:
        element: see `input.split_rows`.
    """

    def local(rows: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        replica, number = context.replica_id_in_sync_group, context.num_replicas_in_sync
        counts = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.one_hot(replica, number) * rows)
        before = tf.cumsum(counts, exclusive=True)[replica]
        return tf.reduce_sum(counts), tf.cast(before, tf.int64)

    return (*element[:2], *strategy.run(local, args=(element[1],)))
