"""`mirrored`: one process with a copy of the model on each device."""

from __future__ import annotations

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.base import CPU_DEVICES
from distlaunch.config.strategies.replicas import MirroredSection
from distlaunch.patches.tensorflow_collectives import mirrored_strategy
from distlaunch.strategies.devices import check_outside_clusters, virtual_cpus
from distlaunch.strategies.replica.peer_sums import CollectiveSums, MergedSums, ReplicaSums
from distlaunch.strategies.replica.strategy import ReplicaStrategy


class Mirrored(ReplicaStrategy):
    """The strategy `mirrored`, on `tf.distribute.MirroredStrategy`."""

    def __init__(self, section: MirroredSection, cluster: Cluster | None = None) -> None:
        del cluster  # the number of replicas depends on the devices only
        devices = _devices(section.replicas)
        check_outside_clusters(section.kind)
        super().__init__(mirrored_strategy(devices))

    def _make_sums(self, local: int) -> ReplicaSums:
        sums = CollectiveSums(is_timed=False)
        return sums if tf.config.list_logical_devices("GPU") else MergedSums(sums)


def _devices(replicas: int | str) -> list[str]:
    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus:
        return virtual_cpus(CPU_DEVICES if replicas == "auto" else int(replicas))
    if replicas == "auto":
        return [f"GPU:{index}" for index in range(gpus)]
    if int(replicas) > gpus:
        raise ConfigError(
            Problem(
                ("strategy", "replicas"), f"got {replicas}, but there are {gpus} GPUs; use at most {gpus}, or 'auto'"
            )
        )
    return [f"GPU:{index}" for index in range(int(replicas))]
