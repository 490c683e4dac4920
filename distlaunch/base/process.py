"""The services of a task's process for the code that runs in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from distlaunch.base.events import Event


@dataclass(frozen=True)
class Process:
    """The services of a task, made once at its start.

    Attributes:
        emit: where events go.
        should_stop: whether this process was asked to stop; asked before each call of the program that trains or
            evaluates.
        on_connected: called when all processes have found each other; TensorFlow has set its signal handlers by then.
        on_step: called with the number of global batches done.
        on_meeting: called before each other call in which all tasks wait for each other.
        saving: entered while this process writes something by itself and training waits for it: the last checkpoint, or
            what callbacks keep.
        writing: entered while a thread writes a checkpoint beside training.
        is_stopping: whether this process was asked to stop; unlike `should_stop`, any thread may ask at any time.
        clock: seconds.
    """

    emit: Callable[[Event], None]
    should_stop: Callable[[], bool]
    on_connected: Callable[[], None] = lambda: None
    on_step: Callable[[int], None] = lambda step: None
    on_meeting: Callable[[], None] = lambda: None
    saving: Callable[[], AbstractContextManager[None]] = nullcontext
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    is_stopping: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
