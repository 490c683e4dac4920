"""`mirrored`: one process with a copy of the model on each device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.spec import Task
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.base import CPU_DEVICES
from distlaunch.config.strategies.replicas import Mirrored as MirroredConfig
from distlaunch.patches import tensorflow_scalars
from distlaunch.patches.tensorflow_collectives import mirrored_strategy
from distlaunch.strategies.devices import virtual_cpus
from distlaunch.strategies.protocol import Steps, StrategyDefaults
from distlaunch.strategies.replica.program import ReplicaProgram
from distlaunch.strategies.replica.sums import Replicas


class Mirrored(StrategyDefaults):
    """The strategy `mirrored`, on `tf.distribute.MirroredStrategy`."""

    kind = "mirrored"
    is_chief = True

    def __init__(self, config: MirroredConfig, task: Task, cluster: Cluster | None = None) -> None:
        del cluster  # the number of replicas depends on the devices only
        self.task = task
        tensorflow_scalars.install()
        self._strategy = mirrored_strategy(_devices(config.replicas))
        self.num_replicas: int = self._strategy.num_replicas_in_sync

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def program(self, steps: Steps) -> ReplicaProgram:
        number = self.num_replicas
        replicas = Replicas(total=number, local=number, first=0)
        program = ReplicaProgram(self._strategy, steps, replicas)
        self._notes = program.notes
        return program

    def notes(self) -> list[str]:
        return self._notes


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
