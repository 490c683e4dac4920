"""What replica processes agree upon: before a step whose data each knows only for itself, and after each graph call.

Before a step it is one small all-reduce, and is made only where it is needed. After a call it is a ballot.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from typing import Any

import tensorflow as tf

from distlaunch.data.differences import check_ends
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.protocol import Vote

_VOTE = 4  # stop, finish, save, next_steps


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


class Ballots:
    """The values that replica processes exchange with the all-reduce at the end of each graph call.

    A ballot is a float64 vector: the vote (stop, finish, save, next steps), then for each process the first step of the
    call whose loss was not finite (0: none), then for each whether its data has ended. Each process fills its own
    places, so that the sum holds them all.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.size = _VOTE + 2 * peers.number

    def cast(self, vote: Vote) -> tf.Tensor:
        """A ballot that holds the vote alone; of `save` and `next_steps` the chief's count."""
        # ballots are added up: the counts of several processes would be added, too
        save, next_steps = (vote.save, vote.next_steps) if self._peers.is_chief else (False, 0)
        return tf.constant([vote.stop, vote.finish, save, next_steps] + [0.0] * (self.size - _VOTE), tf.float64)

    @tf.autograph.experimental.do_not_convert
    def counted(self, ballot: Any, nonfinite: Any, ended: Any) -> Any:
        """In a graph: the ballot with what this process has seen in the call."""
        # the places of the other processes stay zero, so that the sum of all ballots keeps each number apart
        here = tf.one_hot(self._peers.rank, self._peers.number, dtype=tf.float64)
        seen = [here * tf.cast(nonfinite, tf.float64), here * tf.cast(ended, tf.float64)]
        return ballot + tf.concat([tf.zeros([_VOTE], tf.float64), *seen], 0)

    def vote(self, total: Any) -> Vote:
        """The sum of all votes."""
        stop, finish, save, next_steps = total.numpy()[:_VOTE]
        # a sum: each process that wants it has added 1
        return Vote(bool(stop > 0), bool(finish > 0), int(next_steps), bool(save > 0))

    def first_nonfinite(self, total: Any) -> int | None:
        """The first step of the call, from 1, whose loss was not finite in some process."""
        steps = [int(step) for step in total.numpy()[_VOTE : _VOTE + self._peers.number] if step > 0]
        return min(steps, default=None)

    def check_ends(self, total: Any, steps: int, kind: str) -> None:
        """Raises DataError if such data of some processes has ended after so many steps, and that of others has not."""
        ended = total.numpy()[_VOTE + self._peers.number :]
        if self._peers.number > 1 and ended.any():  # names are read from TF_CONFIG, which is no work for every call
            check_ends([bool(each) for each in ended], self._peers.names, steps, kind)
