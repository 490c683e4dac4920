"""Heartbeats of a task, in a small file that the task rewrites in place and the launcher reads.

The file has only counters. The reader timestamps changes with its own clock, so the clocks of hosts need not agree.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal

from distlaunch.base.folders import make_folder
from distlaunch.base.unlisted_threads import start_unlisted

BEAT_S = 0.25  # much shorter than the time after which a task counts as frozen (`heartbeats.py`)
FORMAT = struct.Struct("<QQq??")  # beats, calls, step, saving, writing; the same bytes on every machine
NO_STEP = -1


class Heartbeat:
    """Writes the heartbeats of this task in a thread. Errors of the disk are ignored."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.step: int | None = None
        """Number of finished steps; None before the first step begins."""
        self._beats = self._calls = 0
        self._saving = self._writing = False
        self._memory: mmap.mmap | None = None
        # the heartbeat thread, the training thread and the thread that writes checkpoints change the values
        self._lock = threading.Lock()
        self._file = -1
        """The file, written to if its disk does not support memory mapping."""
        with suppress(OSError):
            make_folder(os.path.dirname(path))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            # reserve the space: on a full disk, writing to a hole in a mapped file would kill the task
            os.posix_fallocate(self._file, 0, FORMAT.size)
            # writing to mapped memory does not wait for the disk
            self._memory = mmap.mmap(self._file, FORMAT.size)
            os.close(self._file)
        # 0 beats would mean that there is no file; see `Heartbeats._frozen`
        self._change(beats=1)
        # the thread also beats during a long step; it stops if another thread never releases the interpreter's lock
        start_unlisted(self._beat)

    def turn(self) -> None:
        """Record that another graph call is about to be made."""
        self._change(calls=1)

    def at_step(self, step: int) -> None:
        self._change(step=step)

    def saving(self) -> AbstractContextManager[None]:
        """Return a context manager for a block in which this task writes files while the other tasks do not."""
        return self._marked("saving")

    def writing(self) -> AbstractContextManager[None]:
        """Return a context manager for the time in which a thread writes files during training.

        It may be exited in another thread.
        """
        return self._marked("writing")

    @contextmanager
    def _marked(self, name: Literal["saving", "writing"]) -> Generator[None]:
        self._change(**{name: True})
        try:
            yield
        finally:
            self._change(**{name: False})

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._change(beats=1)

    def _change(
        self,
        beats: int = 0,
        calls: int = 0,
        step: int | None = None,
        saving: bool | None = None,
        writing: bool | None = None,
    ) -> None:
        with self._lock:
            self._beats += beats
            self._calls += calls
            self.step = self.step if step is None else step
            self._saving = self._saving if saving is None else saving
            self._writing = self._writing if writing is None else writing
            step = NO_STEP if self.step is None else self.step
            record = FORMAT.pack(self._beats, self._calls, step, self._saving, self._writing)
            if self._memory is not None:
                self._memory[:] = record
            elif self._file >= 0:
                self._write(record)

    def _write(self, record: bytes) -> None:
        with suppress(OSError):
            os.pwrite(self._file, record, 0)
