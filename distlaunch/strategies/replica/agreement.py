"""Agreement between replica processes, before a step with process-local data and after each graph call.

Before a step, the processes agree in one small all-reduce, and only if their data requires it. After a call, they
exchange ballots.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from distlaunch.data.differences import check_ends
from distlaunch.strategies.coordination import Peers, Vote

_VOTE = 4  # stop, finish, save, next_steps


@tf.autograph.experimental.do_not_convert
def ended_anywhere(strategy: Any, ended: tf.Tensor) -> tf.Tensor:
    """Return whether the data of any process has ended; needed before each step if lengths are unknown."""

    def local() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(ended, tf.float32))

    return strategy.experimental_local_results(strategy.run(local))[0] > 0


@tf.autograph.experimental.do_not_convert
def count_rows(strategy: Any, element: Any) -> Any:
    """Return an element of process-local rows with the `total` and `start` of the global batch of all processes.

    Args:
        element: an element of the dataset that `data.rows.split_rows` returns.
    """

    def local(rows: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        replica, number = context.replica_id_in_sync_group, context.num_replicas_in_sync
        counts = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.one_hot(replica, number) * rows)
        before = tf.cumsum(counts, exclusive=True)[replica]
        return tf.reduce_sum(counts), tf.cast(before, tf.int64)

    return (*element[:2], *strategy.run(local, args=(element[1],)))


class Ballots:
    """Values that replica processes exchange in the all-reduce at the end of each graph call.

    A ballot is a float64 vector of three parts: the vote (stop, finish, save, next steps); for each process, the first
    step of the call whose loss was not finite, or 0; and for each process, whether its data has ended. A process fills
    only its own entries of the last two parts, so that the sum contains the values of all processes.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.size = _VOTE + 2 * peers.number

    def cast(self, vote: Vote) -> tf.Tensor:
        """Return a ballot with only the vote in it; `save` and `next_steps` are 0 unless this is the chief."""
        # ballots are summed, so these values must come from one process only
        save, next_steps = (vote.save, vote.next_steps) if self._peers.is_chief else (False, 0)
        return tf.constant([vote.stop, vote.finish, save, next_steps] + [0.0] * (self.size - _VOTE), tf.float64)

    @tf.autograph.experimental.do_not_convert
    def with_results(self, ballot: Any, nonfinite: Any, ended: Any) -> Any:
        """Return the ballot with this process's results of the call, in a graph."""
        # the entries of the other processes stay zero, so that the sum contains the entries of each process
        here = tf.one_hot(self._peers.rank, self._peers.number, dtype=tf.float64)
        seen = [here * tf.cast(nonfinite, tf.float64), here * tf.cast(ended, tf.float64)]
        return ballot + tf.concat([tf.zeros([_VOTE], tf.float64), *seen], 0)

    def vote(self, total: Any) -> Vote:
        """Return the combined vote from the sum of all ballots."""
        stop, finish, save, next_steps = total.numpy()[:_VOTE]
        # each process that votes for it adds 1
        return Vote(bool(stop > 0), bool(finish > 0), int(next_steps), bool(save > 0))

    def first_nonfinite(self, total: Any) -> int | None:
        """Return the first step of the call, from 1, whose loss was not finite in some process, or None."""
        steps = [int(step) for step in total.numpy()[_VOTE : _VOTE + self._peers.number] if step > 0]
        return min(steps, default=None)

    def check_ends(self, total: Any, steps: int, kind: str) -> None:
        """Raise DataError if the data of some processes, but not all, ended after this number of steps."""
        ended = total.numpy()[_VOTE + self._peers.number :]
        if self._peers.number > 1 and ended.any():  # only then, because reading names from TF_CONFIG is slow
            check_ends([bool(each) for each in ended], self._peers.names, steps, kind)
