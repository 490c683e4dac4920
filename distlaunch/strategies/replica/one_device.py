"""`one_device`: no distribution; the reference for every other strategy."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from distlaunch.cluster.spec import Task
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.base import OneDevice as OneDeviceConfig
from distlaunch.strategies.protocol import Steps, StrategyDefaults
from distlaunch.strategies.replica.program import ReplicaProgram
from distlaunch.strategies.replica.sums import Replicas


class OneDevice(StrategyDefaults):
    """The strategy `one_device`, without any `tf.distribute` strategy."""

    kind = "one_device"
    num_replicas = 1
    is_chief = True

    def __init__(
        self, config: OneDeviceConfig | None = None, task: Task | None = None, cluster: Cluster | None = None
    ) -> None:
        del config, cluster  # it has no options
        self.task = task or Task("worker", 0)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def program(self, steps: Steps) -> ReplicaProgram:
        replicas = Replicas(total=1, local=1, first=0)
        return ReplicaProgram(tf.distribute.get_strategy(), steps, replicas)
