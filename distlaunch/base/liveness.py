"""Liveness of a task, as its launcher reads it from the file of a `Heartbeat`."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from distlaunch.base.heartbeat import FORMAT, NO_STEP
from distlaunch.base.regular_files import read_regular


class Liveness(NamedTuple):
    """The last report of a task.

    Attributes:
        beats: grows while the process runs, also while a step takes long.
        calls: checks for a stop request, one before each graph call. Tasks that work in lockstep have equally many, but
            for one that the others wait for.
        step: global batches done; None before the first is begun.
        saving: it writes something by itself, and its training waits for that.
        writing: a thread of it writes something beside training.
    """

    beats: int = 0
    calls: int = 0
    step: int | None = None
    saving: bool = False
    writing: bool = False

    @property
    def has_to_finish(self) -> bool:
        """Return True if the task writes something that it can finish without its peers."""
        return self.saving or self.writing


def read_liveness(path: Path) -> Liveness:
    """Read the liveness of a task from a file; without a file, the task has not started."""
    try:
        beats, calls, step, saving, writing = FORMAT.unpack(read_regular(path))
    # no file yet, or one that is just being made
    except (OSError, struct.error):
        return Liveness()
    if not beats:  # zeros: it has its size, and nothing is written yet
        return Liveness()
    return Liveness(beats, calls, None if step == NO_STEP else step, saving, writing)
