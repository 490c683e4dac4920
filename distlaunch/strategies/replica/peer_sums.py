"""Sums of tensors over the replicas of all processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from distlaunch.data.graph_clock import now
from distlaunch.patches.tensorflow_late import tf


class ReplicaSums(Protocol):
    """Sums over the replicas of all processes; all replicas must make the same ones, in the same order."""

    def all_reduce(self, values: Sequence[Any], *, timed: bool = False) -> list[Any]:
        """Return the sums of tensors over all replicas. Call it in a replica, in a graph.

        Args:
            values: tensors with the same shapes and types in all replicas, or `tf.IndexedSlices`.
            timed: whether `waited_s` counts this sum.
        """
        ...

    def waited_s(self) -> float | None:
        """Return the seconds of all timed sums, from the moment at which the values were ready.

        The result is None if they are not measured.
        """
        ...


class CollectiveSums:
    """Sums by TensorFlow's collectives.

    Args:
        is_timed: whether to measure the time. It cannot be measured on a GPU, where an operation that follows others
            starts when they are queued, not when they have ended. Several replicas in a process have no single time.
    """

    def __init__(self, *, is_timed: bool) -> None:
        self._clock: Any = None
        self._has_timed = False
        if is_timed:
            with tf.device("CPU:0"):
                self._clock = tf.Variable(tf.zeros([], tf.float64), trainable=False, name="waited_s")

    def all_reduce(self, values: Sequence[Any], *, timed: bool = False) -> list[Any]:
        context = tf.distribute.get_replica_context()
        # one call for the whole list, so that TensorFlow can pack it: the number of all-reduces costs time, not their
        # size
        if not timed or self._clock is None:
            return context.all_reduce(tf.distribute.ReduceOp.SUM, list(values))
        self._has_timed = True
        ready = now(values)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, list(values))
        self._clock.assign_add(now(summed) - ready)
        return summed

    def waited_s(self) -> float | None:
        # read only if needed: this runs after each graph call, and reading a variable costs as much as an operation
        return float(self._clock.numpy()) if self._has_timed else None


class MergedSums:
    """Sums over the CPU replicas of one process, by additions on its first device, in the order of replicas.

    TensorFlow's collectives hand over tensors between threads, which takes about three times as long.

    Args:
        rest: sums sparse tensors.
    """

    def __init__(self, rest: CollectiveSums) -> None:
        self._rest = rest

    def all_reduce(self, values: Sequence[Any], *, timed: bool = False) -> list[Any]:
        if not all(isinstance(value, tf.Tensor) for value in values):
            return self._rest.all_reduce(values, timed=timed)
        return list(tf.distribute.get_replica_context().merge_call(_add_replicas, args=tuple(values)))

    def waited_s(self) -> float | None:
        return None


def _add_replicas(strategy: Any, *values: Any) -> tuple[tf.Tensor, ...]:
    with tf.device("CPU:0"):
        return tuple(functools.reduce(tf.add, strategy.experimental_local_results(each)) for each in values)
