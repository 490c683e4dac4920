"""What can be imported for a task before it starts."""

from __future__ import annotations

from distlaunch.agent.messages import Preload
from distlaunch.agent.threads import POOL_SIZES
from distlaunch.base.protocol import ATTEMPT, MODULES_FOLDER, RUN_DIR, TASK
from distlaunch.cluster.devices import VISIBLE
from distlaunch.cluster.ports import REUSE_ENV
from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig

READ_LATE = ("TF_CONFIG", RUN_DIR, ATTEMPT, TASK, MODULES_FOLDER, VISIBLE, *REUSE_ENV, *POOL_SIZES)
"""Variables of a task that frameworks read when they look for devices, open a port or make threads, and not when they
are imported. OpenBLAS, which does, is set again: see `tasks.threads`."""


USES = ("evaluate", "predict", "export")
"""Modes of tasks that do not train: less is made ready for them."""


def preload_for(config: RunConfig, task: Task, mode: str) -> Preload:
    """What a task of a run imports in any case."""
    use = [mode] if mode in USES else []
    return Preload("distlaunch.tasks.preload", (config.backend_of(task.job), *use), READ_LATE)
