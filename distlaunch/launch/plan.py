"""What will be started, as data. `distlaunch plan` prints it, `train` executes the same object."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distlaunch.cluster.spec import Task
from distlaunch.run_dir import TaskDir

Mode = Literal["train", "evaluate", "export"]


@dataclass(frozen=True)
class TaskPlan:
    """One process: what is executed, with which additions to the environment, and where its files go."""

    task: Task
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: TaskDir

    def to_plain(self) -> dict[str, Any]:
        return {"task": str(self.task), "argv": list(self.argv), "env": dict(self.env), "logs": str(self.files.path)}


@dataclass(frozen=True)
class LaunchPlan:
    """All processes that this launcher starts for one attempt."""

    run_dir: Path
    attempt: int
    mode: Mode
    tasks: tuple[TaskPlan, ...]
    start_timeout_s: float
    stop_timeout_s: float

    def to_plain(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "attempt": self.attempt,
            "mode": self.mode,
            "start_timeout_s": self.start_timeout_s,
            "stop_timeout_s": self.stop_timeout_s,
            "tasks": [task.to_plain() for task in self.tasks],
        }


def worker_argv(run_dir: Path, attempt: int, task: Task, mode: Mode) -> tuple[str, ...]:
    """The command that runs one task."""
    arguments = ["--run-dir", str(run_dir), "--attempt", str(attempt), "--task", str(task), "--mode", mode]
    return (sys.executable, "-m", "distlaunch.worker", *arguments)
