"""Base class of strategies with replicas in lockstep."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from distlaunch.patches import tensorflow_scalars
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.protocol import Steps, Strategy
from distlaunch.strategies.replica.peer_sums import CollectiveSums, ReplicaSums
from distlaunch.strategies.replica.program import ReplicaProgram
from distlaunch.strategies.replica.sums import Replicas


class ReplicaStrategy(Strategy):
    """A strategy of `tf.distribute`, whose replicas run `ReplicaProgram`.

    Args:
        strategy: the `tf.distribute.Strategy`, in which each process has the same number of replicas.
        peers: the processes; by default, this is the only one.
    """

    def __init__(self, strategy: Any, peers: Peers | None = None) -> None:
        tensorflow_scalars.install()
        self._strategy, self._peers = strategy, peers or Peers()
        self._notes: list[str] = []
        self.num_replicas: int = strategy.num_replicas_in_sync

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def program(self, steps: Steps) -> ReplicaProgram:
        local = self.num_replicas // self._peers.number
        first = self._peers.rank * local
        replicas = Replicas(self.num_replicas, local, first, self._peers, self._make_sums(local))
        program = ReplicaProgram(self._strategy, steps, replicas)
        self._notes = program.notes
        return program

    def _make_sums(self, local: int) -> ReplicaSums:
        """Return how values are summed over the replicas; every process must call it.

        Args:
            local: number of replicas in each process.
        """
        del local
        return CollectiveSums(is_timed=False)

    def notes(self) -> list[str]:
        return self._notes
