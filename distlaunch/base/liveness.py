"""The liveness of a task, which its launcher reads from the file of a `Heartbeat`."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from distlaunch.base.heartbeat import FORMAT, NO_STEP
from distlaunch.base.regular_files import read_regular


class Liveness(NamedTuple):
    """The last report of a task.

    Attributes:
        beats: a counter that grows while the process runs, also during a long step.
        calls: number of graph calls begun. In lockstep, all tasks have the same number, except a task for which the
            others wait.
        step: number of finished steps; None before the first step begins.
        saving: True while this task alone writes files, and its training waits for that.
        writing: True while a thread of the task writes files during training.
    """

    beats: int = 0
    calls: int = 0
    step: int | None = None
    saving: bool = False
    writing: bool = False

    @property
    def has_to_finish(self) -> bool:
        """Return True if the task writes files and can finish that without its peers."""
        return self.saving or self.writing


def read_liveness(path: Path) -> Liveness:
    """Read the liveness of a task from a file. Return zeros if the task has not written it yet."""
    try:
        beats, calls, step, saving, writing = FORMAT.unpack(read_regular(path))
    # there is no file yet, or it is just being created
    except (OSError, struct.error):
        return Liveness()
    if not beats:  # space for the file is allocated, but nothing has been written
        return Liveness()
    return Liveness(beats, calls, None if step == NO_STEP else step, saving, writing)
