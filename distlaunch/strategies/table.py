"""The ways to distribute work, one file each, behind one protocol."""

from __future__ import annotations

import importlib

from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.strategies.protocol import Strategy

TABLE = {
    "one_device": "replica.one_device:OneDevice",
    "mirrored": "replica.mirrored:Mirrored",
    "multi_worker_mirrored": "replica.multi_worker_mirrored:MultiWorkerMirrored",
    "parameter_server": "parameter_server.strategy:ParameterServer",
    "dtensor": "dtensor.strategy:DTensor",
    "jax": "jax.strategy:Jax",
}


def create(config: RunConfig, task: Task) -> Strategy:
    """The strategy of a run, set up in this process. Must come before any TensorFlow operation."""
    # imported only when asked for: TensorFlow's strategies must not import JAX, nor the other way round
    module, name = TABLE[config.strategy.kind].split(":")
    made = getattr(importlib.import_module(f"distlaunch.strategies.{module}"), name)
    return made(config.strategy, task, config.cluster)
