"""A run's attempts, made one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distlaunch.base.events import EpochEnded, Event, Notice
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.training.session import Session


def losses_and_notices(folder: Path, configs: Iterable[dict[str, Any]]) -> tuple[list[float], list[str]]:
    """Return the loss of each epoch, in one attempt after the other, and what the run said."""
    losses: list[float] = []
    said: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, EpochEnded):
            losses.append(event.logs["loss"])
        elif isinstance(event, Notice):
            said.append(event.message)

    for raw in configs:
        session = Session.build(
            RunConfig.model_validate(raw), RunDir(folder), Task("worker", 0), Process(emit, lambda: False)
        )
        session.run_training()
    return losses, said
