"""Saves checkpoints of a training run in the background, with the state of its callbacks, and restores them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import keras

from distlaunch.base.errors import CheckpointWriteError
from distlaunch.base.events import CheckpointFailed, CheckpointSaved, Notice
from distlaunch.base.process import Process
from distlaunch.checkpoints.best import BestEpoch
from distlaunch.checkpoints.callback_state import restore_state, stored_places, stored_state
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.policy import SavePolicy
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.checkpoints.throttle import FULL_SPEED, Throttle
from distlaunch.checkpoints.writers import ChiefWriter, PartsWriter, Snapshot, Writer, WriteRequest
from distlaunch.config.run import RunConfig
from distlaunch.strategies.protocol import Program
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import SLOTS, state_variables

CALLBACK = "callback/"
"""Prefix of the names of callbacks' arrays in checkpoints."""
_NICENESS = 15
"""Niceness of the writing thread, which then gets 3 % of a core that is busy with steps; with 10, it gets 10 %."""
_THROTTLED = 1 / 3
"""Fraction of the time between checkpoints in which writing is throttled.

After this time, the rest is written at full speed, so that the next checkpoint does not have to wait.
"""


@dataclass(frozen=True)
class _Save:
    """A checkpoint to be written.

    Attributes:
        trained: names of the values that must be finite.
        otherwise: words that say what happens if the checkpoint cannot be written; None if the run then fails.
        best: whether the epoch is the best so far.
        began: time at which training stopped for the checkpoint.
        resumed: time at which training continued; None if it waits until the checkpoint is written.
    """

    snapshot: Snapshot
    trained: set[str]
    progress: Progress
    otherwise: str | None
    best: bool
    began: float
    resumed: float | None


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that the thread is writing.

    Attributes:
        throttle: slows the writing down.
        own_part: set when this process has written its part.
        done: a future that completes when the checkpoint is committed, or when another process will commit it.
    """

    throttle: Throttle
    own_part: threading.Event
    done: Future[None]


class Saver:
    """Copies the state at a step; a thread then checks, writes and commits it while training continues.

    One checkpoint is written at a time, so the next save waits for it. Leaving the context also waits. It raises an
    error of the thread even if training has failed too, because the thread's error was earlier.

    Args:
        store: store in which the chief commits checkpoints.
        best: the best epoch of the run; checkpoints contain its record.
        policy: records the cost of a checkpoint.
        on_nonfinite: called with the name of a value that is not finite, and the step; may raise an error.
        together: writes with other processes; None if the chief writes alone.
    """

    def __init__(
        self,
        config: RunConfig,
        model: keras.Model,
        callbacks: list[keras.callbacks.Callback],
        process: Process,
        store: CheckpointStore,
        *,
        is_chief: bool,
        best: BestEpoch,
        policy: SavePolicy,
        on_nonfinite: Callable[[str, int], None],
        together: PartsWriter | None = None,
    ) -> None:
        self._config, self._model, self._callbacks = config, model, callbacks
        self._process, self._store, self._is_chief = process, store, is_chief
        self._best, self._policy, self._on_nonfinite = best, policy, on_nonfinite
        # on Linux, `os.nice` affects only the thread; steps have priority if there are few cores
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=os.nice, initargs=(_NICENESS,))
        self._pending: _Pending | None = None
        self._writer: Writer = together or ChiefWriter(store, is_chief=is_chief)
        self._patient_until = math.inf
        self._saved_step: int | None = None
        self._began_at = process.clock()
        """Time of the last save, or of the beginning of training."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:  # limit the wait, because other processes may have ended too
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
        """Take a checkpoint, which the chief commits. Every task must call this.

        Args:
            otherwise: words that say what happens if the checkpoint cannot be written; None if the run then fails.
            wait: whether to wait until the checkpoint is committed; if not, training continues once the state is
                copied.
            best: whether the epoch is the best so far, so that the checkpoint is also kept as `best`.

        Raises:
            CheckpointWriteError: it cannot be written, and `otherwise` is None.
            NonFiniteError: this state, or the previous one, is not finite.
        """
        process = self._process
        process.on_meeting()
        began = process.clock()
        throttled_until, self._began_at = began + _THROTTLED * (began - self._began_at), began
        if self._writer.takes_part:
            self._wait()  # before the copy, because two copies may not fit into memory
        snapshot = self._writer.snapshot(program)
        if not self._writer.takes_part:
            return
        wait = wait or not self._config.checkpoint.beside_training
        with process.saving():
            if self._is_chief:
                progress = self._with_callbacks(snapshot.state, progress)
            resumed = None if wait else process.clock()
            save = _Save(snapshot, trained_names(self._model), progress, otherwise, best, began, resumed)
            if not wait:
                self._start(save, Throttle(lambda: process.is_stopping() or process.clock() >= throttled_until))
        if wait:  # in this thread, at full speed
            with ExitStack() as writing:
                writing.enter_context(process.writing())
                self._write(save, writing, FULL_SPEED)
        self._policy.saved(process.clock())

    def check(self) -> None:
        """Raise an error of the thread, if there is one."""
        if self.is_idle:
            self._wait()

    @property
    def is_idle(self) -> bool:
        """True if no checkpoint is being written."""
        return self._pending is None or self._pending.done.done()

    def _wait(self) -> None:
        if self._pending is not None:
            # reset first, so that an error is raised only once
            pending, self._pending = self._pending, None
            pending.throttle.release()
            with self._process.saving():
                pending.own_part.wait()
            pending.done.result()  # outside `saving`, because waiting for other processes is not this process's fault

    def _start(self, save: _Save, throttle: Throttle) -> None:
        own_part = threading.Event()
        with ExitStack() as writing:
            writing.callback(own_part.set)
            writing.enter_context(self._process.writing())
            # `writing()` is entered before the thread starts, so that the task counts as writing the whole time
            self._pending = _Pending(
                throttle, own_part, self._thread.submit(self._write_in_background, save, writing.pop_all(), throttle)
            )

    def _with_callbacks(self, state: State, progress: Progress) -> Progress:
        """Add the callbacks' state at this step to the state and the progress."""
        stored = [stored_state(callback) for callback in self._callbacks]
        for index, (_, arrays) in enumerate(stored):
            state.update({f"{CALLBACK}{index}/{name}": array for name, array in arrays.items()})
        return replace(
            progress,
            callbacks=[plain for plain, _ in stored],
            stop_training=bool(self._model.stop_training),
            best=self._best.record,
        )

    # in the thread

    def _write_in_background(self, save: _Save, writing: ExitStack, throttle: Throttle) -> None:
        with writing:
            self._write(save, writing, throttle)

    def _write(self, save: _Save, writing: ExitStack, throttle: Throttle) -> None:
        step, began = save.progress.step, self._process.clock()
        signs = iter([writing])  # the first context, which has been entered already
        request = WriteRequest(
            save.progress,
            self._config.to_public(),
            save.best,
            save.trained,
            on_nonfinite=lambda name: self._on_nonfinite(name, step),
            writing=lambda: next(signs, None) or self._process.writing(),
            given_up=lambda: time.monotonic() > self._patient_until,
            throttle=throttle,
        )
        try:
            written = self._writer.write(save.snapshot, request)
        except OSError as error:
            self._report_failure(save, error.strerror or str(error))
            return
        if written is None or step == self._saved_step:
            # another process reports this checkpoint, or the step has already been reported: it was saved again because
            # callbacks or the end of an epoch changed the state
            return
        path, num_bytes = written
        self._saved_step = step
        now = self._process.clock()
        stalled_s = (now if save.resumed is None else save.resumed) - save.began
        self._policy.learn(stalled_s, now - began)
        self._process.emit(
            CheckpointSaved(step=step, path=str(path), num_bytes=num_bytes, seconds=now - began, stalled_s=stalled_s)
        )

    def _report_failure(self, save: _Save, why: str) -> None:
        step = save.progress.step
        if save.best and save.progress.best is not None:
            self._best.forget(save.progress.best)
        if save.otherwise is None:
            message = f"the last checkpoint, of step {step}, cannot be written: {why}"
            raise CheckpointWriteError(f"{message}; free disk space, and resume the run") from None
        self._process.emit(CheckpointFailed(step=step, reason=f"not written: {why}; {save.otherwise}"))

    # at the start

    def restore(self, start: Progress, arrays: State) -> None:
        """Restore the callbacks, the history and the best value from a checkpoint."""
        self._best.restore(start.best)
        if self._is_chief and self._best.record is None:
            self._look_for_best(start)
        for callback, place in zip(self._callbacks, stored_places(self._callbacks, start.callbacks), strict=True):
            if place < 0:
                self._report_new_state(callback, start)
                continue
            prefix = f"{CALLBACK}{place}/"
            own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            for name, reason in restore_state(callback, start.callbacks[place], own).items():
                self._note(
                    f"{type(callback).__name__}.{name} has its initial value, because checkpoints cannot hold {reason}"
                )
        history = self._model.history
        history.history = {name: list(values) for name, values in start.history.items()}
        # like Keras's `fit`, list the epochs that were trained
        history.epoch = list(range(start.epoch))

    def _report_new_state(self, callback: keras.callbacks.Callback, start: Progress) -> None:
        monitor, name = getattr(callback, "monitor", None), type(callback).__name__
        stored = next((state["monitor"] for state in start.callbacks if state["class"] == name), None)
        if stored is not None and monitor is not None and stored != monitor:
            self._note(f"{name} starts anew, because it watches {monitor} now, and has watched {stored}")

    def _note(self, message: str) -> None:
        if self._is_chief:
            self._process.emit(Notice(level="info", message=message))

    def _look_for_best(self, start: Progress) -> None:
        """Find the best epoch in the history, if the checkpoint has no record with this metric and mode."""
        if (found := self._best.in_history(start.history, start.epoch)) is None:
            return
        number, value = found
        if number is not None and self._store.find_as_best(number):
            self._best.take(value)
            return
        which = "an earlier epoch" if number is None else f"epoch {number}"
        message = (
            f"checkpoint.best: {which} is the best so far by {self._best}, but its checkpoint no longer exists; "
            "the best of the following epochs will be kept"
        )
        self._process.emit(Notice(level="warning", message=message))


def trained_names(model: Any) -> set[str]:
    """Return the names of the trainable weights and the optimizers' variables in a snapshot.

    Other variables may be infinite by design, such as the smallest value so far.
    """
    named = state_variables(model).items()
    return {name for name, variable in named if name.startswith(SLOTS) or getattr(variable, "trainable", True)}
