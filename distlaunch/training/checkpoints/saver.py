"""Saves checkpoints of a training run in the background, with the state of its callbacks, and restores them."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import keras

from distlaunch.base.errors import CheckpointWriteError
from distlaunch.base.events import CheckpointFailed, CheckpointSaved, Notice
from distlaunch.config.run import RunConfig
from distlaunch.strategies.protocol import Program, State
from distlaunch.strategies.state.pace import FULL_SPEED, Pace
from distlaunch.training.callbacks import (
    array_state,
    place_of,
    plain_state,
    restore_arrays,
    restore_state,
)
from distlaunch.training.checkpoints.best import BestEpoch
from distlaunch.training.checkpoints.interval import SaveTimer
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checkpoints.writers import ChiefWriter, Snapshot, Writer, WriteRequest
from distlaunch.training.checks.nonfinite import NonFinite, trained_names
from distlaunch.training.surroundings import Surroundings

CALLBACK = "callback/"
"""Names in checkpoints of arrays that callbacks hold begin so."""
_NICENESS = 15
"""Of the thread that writes: beside a busy step it gets 3 % of a core, at 10 it got 10 %."""
_AT_A_PACE = 1 / 3
"""Of the time between checkpoints; the rest is then written at full speed, so that the next has not to wait for it."""


@dataclass(frozen=True)
class _Save:
    """One checkpoint to be written.

    Attributes:
        trained: names of the values that must be finite.
        otherwise: what happens if it cannot be written; None: the run fails.
        best: whether it is that of the best epoch so far.
        began: when training stopped for it.
        resumed: when training went on; None: it waits until the checkpoint is written.
    """

    snapshot: Snapshot
    trained: frozenset[str]
    progress: Progress
    otherwise: str | None
    best: bool
    began: float
    resumed: float | None


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that the thread writes.

    Attributes:
        pace: at which it is written.
        own_part: set when this process has written what it can without others.
        done: when it is committed, or another process does that.
    """

    pace: Pace
    own_part: threading.Event
    done: Future[None]


class Saver:
    """Copies the state at a step, and has a thread check, write and commit it while training goes on.

    One checkpoint is written at a time: the next save waits for it. Leaving the context waits too, and raises what went
    wrong in the thread also where training itself has failed: it was earlier.
    """

    def __init__(
        self,
        config: RunConfig,
        model: keras.Model,
        callbacks: list[keras.callbacks.Callback],
        around: Surroundings,
        nonfinite: NonFinite,
    ) -> None:
        self._config, self._model, self._callbacks = config, model, callbacks
        self._around, self._nonfinite = around, nonfinite
        # `os.nice` of Linux is for a thread; steps come first where there are few cores
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=os.nice, initargs=(_NICENESS,))
        self._pending: _Pending | None = None
        self._writer: Writer = around.together or ChiefWriter(around.store, is_chief=around.is_chief)
        self._patient_until = math.inf
        self._saved_step: int | None = None
        self._began_at = around.clock()
        """The last save, or training."""
        self.best = BestEpoch(config.checkpoint.best)
        section = config.checkpoint
        every_s = section.every_minutes and 60 * section.every_minutes
        self._timer = SaveTimer(every_s, auto=section.every is not None, failures=around.failures, now=around.clock())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:  # as far as other processes are still there
            self._patient_until = time.monotonic() + self._config.cluster.stop_timeout_s
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def save(
        self,
        program: Program,
        progress: Progress,
        *,
        otherwise: str | None = "training continues",
        wait: bool = False,
        best: bool = False,
    ) -> None:
        """Takes a checkpoint; every task must call it, and the chief commits it.

        Args:
            otherwise: what then happens if it cannot be written; None: the run fails.
            best: it is that of the best epoch so far, and is kept as such, too.
            wait: until it is committed; else training goes on when the state is copied.

        Raises:
            CheckpointWriteError: it cannot be written, and nothing happens otherwise.
            NonFiniteError: this state, or the one before, is not finite.
        """
        around = self._around
        around.on_meeting()
        began = around.clock()
        paced_until, self._began_at = began + _AT_A_PACE * (began - self._began_at), began
        if self._writer.takes_part:
            self._wait()  # before the copy: two of them may be more than the memory holds
        snapshot = self._writer.snapshot(program)
        if not self._writer.takes_part:
            return
        wait = wait or not self._config.checkpoint.beside_training
        with around.saving():
            if around.is_chief:
                progress = self._with_callbacks(snapshot.state, progress)
            trained = frozenset(trained_names(self._model))
            resumed = None if wait else around.clock()
            save = _Save(snapshot, trained, progress, otherwise, best, began, resumed)
            if not wait:
                self._start(save, Pace(lambda: around.is_stopping() or around.clock() >= paced_until))
        if wait:  # in this thread, which has not to stand back
            with ExitStack() as writing:
                writing.enter_context(around.writing())
                self._write(save, writing, FULL_SPEED)
        self._timer.took(around.clock())

    @property
    def is_due(self) -> bool:
        """Whether the clock asks for a checkpoint; the chief's counts."""
        return self._around.is_chief and self._timer.is_due(self._around.clock())

    def check(self) -> None:
        """Raises what has gone wrong in the thread, if anything has."""
        if self.is_idle:
            self._wait()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return self._pending is None or self._pending.done.done()

    def _wait(self) -> None:
        if self._pending is not None:
            # first: what it raises is raised once
            pending, self._pending = self._pending, None
            pending.pace.hurry()
            with self._around.saving():
                pending.own_part.wait()
            pending.done.result()  # others may write still, and who waits for them holds nobody up

    def _start(self, save: _Save, pace: Pace) -> None:
        own_part = threading.Event()
        with ExitStack() as writing:
            writing.callback(own_part.set)
            writing.enter_context(self._around.writing())
            # entered before the thread runs: there is no moment at which something is written and no mark says so
            self._pending = _Pending(
                pace, own_part, self._thread.submit(self._write_in_background, save, writing.pop_all(), pace)
            )

    def _with_callbacks(self, state: State, progress: Progress) -> Progress:
        """Adds what callbacks hold at this step to the state and the progress."""
        for index, callback in enumerate(self._callbacks):
            state.update({f"{CALLBACK}{index}/{name}": array for name, array in array_state(callback).items()})
        return replace(
            progress,
            callbacks=[plain_state(callback) for callback in self._callbacks],
            stop_training=bool(self._model.stop_training),
            best=self.best.record,
        )

    # in the thread

    def _write_in_background(self, save: _Save, writing: ExitStack, pace: Pace) -> None:
        with writing:
            self._write(save, writing, pace)

    def _write(self, save: _Save, writing: ExitStack, pace: Pace) -> None:
        step, began = save.progress.step, self._around.clock()
        signs = iter([writing])  # entered already
        request = WriteRequest(
            save.progress,
            self._config.to_public(),
            save.best,
            save.trained,
            on_nonfinite=lambda name: self._nonfinite.state(name, step),
            writing=lambda: next(signs, None) or self._around.writing(),
            given_up=lambda: time.monotonic() > self._patient_until,
            pace=pace,
        )
        try:
            written = self._writer.write(save.snapshot, request)
        except OSError as error:
            self._report_failure(save, error.strerror or str(error))
            return
        if written is None or step == self._saved_step:
            return  # written anew with what callbacks or the end of an epoch have changed: no news to anyone
        path, num_bytes = written
        self._saved_step = step
        now = self._around.clock()
        stalled_s = (now if save.resumed is None else save.resumed) - save.began
        self._timer.learn(stalled_s, now - began)
        self._around.emit(
            CheckpointSaved(step=step, path=str(path), num_bytes=num_bytes, seconds=now - began, stalled_s=stalled_s)
        )

    def _report_failure(self, save: _Save, why: str) -> None:
        step = save.progress.step
        if save.best:
            self.best.lose()
        if save.otherwise is None:
            message = f"the last checkpoint, of step {step}, cannot be written: {why}"
            raise CheckpointWriteError(f"{message}; make room, and resume the run") from None
        self._around.emit(CheckpointFailed(step=step, reason=f"not written: {why}; {save.otherwise}"))

    # at the start

    def restore(self, start: Progress, arrays: State) -> None:
        """Puts back what a checkpoint holds of the callbacks, the history, and the best value."""
        self.best.restore(start.best)
        if self._around.is_chief and self.best.record is None:
            self._look_for_best(start)
        for index, callback in enumerate(self._callbacks):
            place = place_of(callback, index)
            if place >= len(start.callbacks) or start.callbacks[place]["class"] != type(callback).__name__:
                continue  # the config has another there by now
            restore_state(callback, start.callbacks[place])
            prefix = f"{CALLBACK}{place}/"
            own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            restore_arrays(callback, own)
        history = self._model.history
        history.history = {name: list(values) for name, values in start.history.items()}
        # `fit` lists the epochs that it has done
        history.epoch = list(range(start.epoch))

    def _look_for_best(self, start: Progress) -> None:
        """The best was by another metric or mode, or not asked for, when the checkpoint was written."""
        if (found := self.best.in_history(start.history, start.epoch)) is None:
            return
        number, value = found
        if number is not None and self._around.store.find_as_best(number):
            self.best.take(value)
            return
        which = "an earlier epoch" if number is None else f"epoch {number}"
        message = (
            f"checkpoint.best: {which} is the best so far by {self.best}, and its checkpoint is not kept any more; "
            "from here on the best of later epochs is kept"
        )
        self._around.emit(Notice(level="warning", message=message))
