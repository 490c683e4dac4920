"""Heartbeats of a task, in a small file that the task rewrites in place and the launcher reads.

Counters only: the reader timestamps changes with its own clock, so the clocks of two machines need not agree.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.25  # several in the time after which a task counts as frozen (`heartbeats.py`)
_FORMAT = struct.Struct("<QQq??")  # beats, turns, step, saving, writing; the same bytes on every machine
_NO_STEP = -1


class Signs(NamedTuple):
    """What a task last reported.

    Attributes:
        beats: grows while the process runs, also while a step takes long.
        turns: checks for a stop request, one before each graph call. Tasks that work in lockstep have equally many, but
            for one that the others wait for.
        step: global batches done; None before the first is begun.
        saving: it writes something by itself, and its training waits for that.
        writing: a thread of it writes something beside training.
    """

    beats: int = 0
    turns: int = 0
    step: int | None = None
    saving: bool = False
    writing: bool = False

    @property
    def has_to_finish(self) -> bool:
        """Whether it writes what it can bring to its end also when all its peers are gone."""
        return self.saving or self.writing


class Heartbeat:
    """Told by a task; a thread beats. A disk that cannot be written is no reason to fail."""

    def __init__(self, path: Path) -> None:
        self._signs = Signs()
        self._memory: mmap.mmap | None = None
        # the beating thread, the one that trains and the one that writes checkpoints change the signs
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb+") as file:
                os.posix_fallocate(file.fileno(), 0, _FORMAT.size)  # a hole would kill the task on a full disk
                # a write into memory, which waits for no disk
                self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        # 0 beats means no file; see `Heartbeats._frozen`
        self._change(beats=1)
        # a thread of its own beats while a step takes long; it stops when the interpreter's lock is held for good
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def step(self) -> int | None:
        return self._signs.step

    def turn(self) -> None:
        """Training goes on: another graph call is about to be made."""
        self._change(turns=1)

    def at_step(self, step: int) -> None:
        self._change(step=step)

    def saving(self) -> AbstractContextManager[None]:
        """Meanwhile the task writes something by itself."""
        return self._meanwhile("saving")

    def writing(self) -> AbstractContextManager[None]:
        """Meanwhile a thread writes something beside training; another thread may leave this."""
        return self._meanwhile("writing")

    @contextlib.contextmanager
    def _meanwhile(self, sign: str) -> Iterator[None]:
        self._change(**{sign: True})
        try:
            yield
        finally:
            self._change(**{sign: False})

    def _beat(self) -> None:
        never = threading.Event()
        while not never.wait(BEAT_S):
            self._change(beats=1)

    def _change(
        self,
        beats: int = 0,
        turns: int = 0,
        step: int | None = None,
        saving: bool | None = None,
        writing: bool | None = None,
    ) -> None:
        with self._lock:
            was = self._signs
            at = self._signs = Signs(
                was.beats + beats,
                was.turns + turns,
                was.step if step is None else step,
                was.saving if saving is None else saving,
                was.writing if writing is None else writing,
            )
            if self._memory is not None:
                step = _NO_STEP if at.step is None else at.step
                _FORMAT.pack_into(self._memory, 0, at.beats, at.turns, step, at.saving, at.writing)


def read_signs(path: Path) -> Signs:
    """The signs in a file; those of a task that has not begun if there is none."""
    try:
        beats, turns, step, saving, writing = _FORMAT.unpack(path.read_bytes())
    # no file yet, or one that is just being made
    except (OSError, struct.error):
        return Signs()
    return Signs(beats, turns, None if step == _NO_STEP else step, saving, writing)
