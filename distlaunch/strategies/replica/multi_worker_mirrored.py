"""`multi_worker_mirrored`: several processes in lockstep, with gradients summed over all of them."""

from __future__ import annotations

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.replicas import MultiWorkerMirroredSection
from distlaunch.strategies.coordination import Peers, addresses_and_rank, await_chief
from distlaunch.strategies.replica.peer_sums import CollectiveSums, ReplicaSums
from distlaunch.strategies.replica.shared_memory import connect
from distlaunch.strategies.replica.strategy import ReplicaStrategy
from distlaunch.strategies.tensorflow_store import TensorFlowStore

_COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


class MultiWorkerMirrored(ReplicaStrategy):
    """The strategy `multi_worker_mirrored`, on `tf.distribute.MultiWorkerMirroredStrategy`."""

    def __init__(self, section: MultiWorkerMirroredSection, cluster: Cluster | None = None) -> None:
        del cluster  # TF_CONFIG determines the number of workers
        _check_local_replicas(section.replicas_per_worker)
        options = tf.distribute.experimental.CommunicationOptions(implementation=_COMMUNICATION[section.communication])
        addresses, rank = addresses_and_rank()
        await_chief(addresses[0], rank)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        super().__init__(strategy, Peers(len(addresses), rank, TensorFlowStore(), addresses[0]))
        self._may_share_memory = section.communication == "auto"

    def _make_sums(self, local: int) -> ReplicaSums:
        if self._peers.number == 1 or local > 1 or tf.config.list_logical_devices("GPU"):
            return CollectiveSums(is_timed=False)
        others = CollectiveSums(is_timed=True)
        shared = connect(self._peers, others) if self._may_share_memory else None
        return shared or others


def _check_local_replicas(wanted: int | str) -> None:
    gpus = len(tf.config.list_physical_devices("GPU"))
    have = max(gpus, 1)  # without a GPU, the CPU is one replica
    if wanted != "auto" and wanted != have:
        what = f"{gpus} GPUs, with one replica on each" if gpus else "no GPU, and TensorFlow uses one replica on a CPU"
        message = f"got {wanted}, but this worker has {what}; write 'auto'"
        raise ConfigError(Problem(("strategy", "replicas_per_worker"), message))
