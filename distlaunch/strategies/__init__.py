"""The ways to distribute work, one file each, behind one protocol."""

from __future__ import annotations

import importlib

from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.strategies.protocol import Strategy

TABLE = {
    "one_device": "one_device:OneDevice",
    "mirrored": "mirrored:Mirrored",
    "multi_worker_mirrored": "multi_worker_mirrored:MultiWorkerMirrored",
    "parameter_server": "parameter_server:ParameterServer",
    "dtensor": "dtensor_mesh:DTensor",
    "jax": "jax_mesh:Jax",
}


def create(config: RunConfig, task: Task) -> Strategy:
    """The strategy of a run, set up in this process. Must come before any TensorFlow operation."""
    module, name = TABLE[config.strategy.kind].split(":")
    made = getattr(importlib.import_module(f"distlaunch.strategies.{module}"), name)
    return made(config.strategy, task, config.cluster)
