"""`one_device`: no distribution; the reference for every other strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.base import OneDeviceSection
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.strategy import ReplicaStrategy


class OneDevice(ReplicaStrategy):
    """The strategy `one_device`, without any `tf.distribute` strategy but the default one."""

    def __init__(self, section: OneDeviceSection | None = None, cluster: Cluster | None = None) -> None:
        del section, cluster  # it has no options
        super().__init__(tf.distribute.get_strategy())

    def scope(self) -> AbstractContextManager[Any]:
        # the default strategy's own scope forbids that the model's function uses another strategy
        return nullcontext()
