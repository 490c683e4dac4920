"""`multi_worker_mirrored`: several processes in lockstep, with gradients summed over all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.spec import Task
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.replicas import MultiWorkerMirrored as MultiWorkerMirroredConfig
from distlaunch.patches import tensorflow_scalars
from distlaunch.strategies.coordination import MultiProcessStrategy, Peers, addresses_and_rank
from distlaunch.strategies.protocol import Steps
from distlaunch.strategies.replica.program import ReplicaProgram
from distlaunch.strategies.replica.sums import Replicas
from distlaunch.strategies.tensorflow_store import TensorFlowStore

_COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


class MultiWorkerMirrored(MultiProcessStrategy):
    """The strategy `multi_worker_mirrored`, on `tf.distribute.MultiWorkerMirroredStrategy`."""

    kind = "multi_worker_mirrored"

    def __init__(self, config: MultiWorkerMirroredConfig, task: Task, cluster: Cluster | None = None) -> None:
        del cluster  # TF_CONFIG determines the number of workers
        self.task = task
        tensorflow_scalars.install()
        _check_local_replicas(config.replicas_per_worker)
        options = tf.distribute.experimental.CommunicationOptions(implementation=_COMMUNICATION[config.communication])
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        addresses, rank = addresses_and_rank()
        self._peers = Peers(len(addresses), rank, TensorFlowStore(), addresses[0])
        self.num_replicas: int = self._strategy.num_replicas_in_sync

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def program(self, steps: Steps) -> ReplicaProgram:
        # TensorFlow assumes that all workers have the same number of devices
        local = self.num_replicas // self._peers.number
        first = self._peers.rank * local
        replicas = Replicas(total=self.num_replicas, local=local, first=first, peers=self._peers)
        program = ReplicaProgram(self._strategy, steps, replicas)
        self._notes = program.notes
        return program

    def notes(self) -> list[str]:
        return self._notes


def _check_local_replicas(wanted: int | str) -> None:
    gpus = len(tf.config.list_physical_devices("GPU"))
    have = max(gpus, 1)  # without a GPU, the CPU is one replica
    if wanted != "auto" and wanted != have:
        what = f"{gpus} GPUs, with one replica on each" if gpus else "no GPU, and TensorFlow uses one replica on a CPU"
        message = f"got {wanted}, but this worker has {what}; write 'auto'"
        raise ConfigError(Problem(("strategy", "replicas_per_worker"), message))
