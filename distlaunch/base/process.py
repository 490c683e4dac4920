"""The services that a task's process offers to the code that runs in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.events import Event
from distlaunch.base.forked import ForkedProcess


@dataclass(frozen=True)
class Process:
    """The services of a task, created once at its start.

    Attributes:
        emit: records an event.
        should_stop: returns True if this process was asked to stop. Called before each call of the training or
            evaluation function.
        on_connected: called when all processes have connected, after TensorFlow has set its signal handlers.
        on_step: called with the number of finished steps.
        on_meeting: called before all tasks wait for each other outside of the training and evaluation functions.
        saving: entered while this process alone writes files and training waits for that: the last checkpoint, or
            files of callbacks.
        writing: entered while a thread writes a checkpoint during training.
        is_stopping: returns True if this process was asked to stop. Unlike `should_stop`, any thread may call it at any
            time.
        files: folder of the task's files; None if the process has no such folder. Its steps are then not compared.
        forked: a child that has imported the framework, for the comparison of steps; None if there is none.
        clock: returns monotonic seconds.
    """

    emit: Callable[[Event], None]
    should_stop: Callable[[], bool]
    on_connected: Callable[[], None] = lambda: None
    on_step: Callable[[int], None] = lambda step: None
    on_meeting: Callable[[], None] = lambda: None
    saving: Callable[[], AbstractContextManager[None]] = nullcontext
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    is_stopping: Callable[[], bool] = lambda: False
    files: Path | None = None
    forked: ForkedProcess | None = None
    clock: Callable[[], float] = time.monotonic
