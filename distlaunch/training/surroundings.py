"""What training needs of the process that it runs in."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from distlaunch.base.events import Event
from distlaunch.training.checkpoints.files import CheckpointStore
from distlaunch.training.checkpoints.interval import Failures
from distlaunch.training.checkpoints.writers import PartsWriter


@dataclass(frozen=True)
class Surroundings:
    """What the loop needs from the process it runs in.

    Attributes:
        should_stop: asked before each call of the program that trains or evaluates.
        on_step: called with the number of global batches done.
        on_meeting: called before each other call in which all tasks wait for each other.
        saving: entered while this process writes something by itself and training waits for it: the last checkpoint, or
            what callbacks keep.
        failures: of the run before this attempt.
        is_stopping: whether this process was asked to stop; unlike `should_stop`, any thread may ask at any time.
        writing: entered while a thread writes a checkpoint beside training.
        together: writes checkpoints with other processes; None: the chief writes them.
    """

    emit: Callable[[Event], None]
    should_stop: Callable[[], bool]
    store: CheckpointStore
    is_chief: bool
    on_step: Callable[[int], None] = lambda step: None
    on_meeting: Callable[[], None] = lambda: None
    saving: Callable[[], AbstractContextManager[None]] = nullcontext
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    together: PartsWriter | None = None
    failures: Failures = Failures()  # noqa: RUF009 (frozen)
    is_stopping: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
