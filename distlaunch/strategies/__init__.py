"""The ways to distribute work, one file each, behind one protocol."""

from __future__ import annotations

import importlib
from typing import Any

from distlaunch.cluster.spec import Task
from distlaunch.strategies.protocol import Strategy

TABLE = {
    "one_device": "one_device:OneDevice",
    "mirrored": "mirrored:Mirrored",
    "multi_worker_mirrored": "multi_worker_mirrored:MultiWorkerMirrored",
}


def create(config: Any, task: Task) -> Strategy:
    """The strategy of a `strategy:` section, set up in this process. Must come before any TensorFlow operation."""
    module, name = TABLE[config.kind].split(":")
    return getattr(importlib.import_module(f"distlaunch.strategies.{module}"), name)(config, task)
