"""The interface through which the launcher reports progress and shows the output of tasks."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

from distlaunch.base.errors import ExitCode, StopRequested
from distlaunch.base.events import Event
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.late_signals import LateSignals

MAX_QUEUED_CHARACTERS = 16_000_000
"""Characters of output lines that may wait to be shown: 4,000 of the longest lines, or about 50,000 usual ones."""
LINE_OVERHEAD = 200
"""Number of characters that is added to the length of each queued line."""
_TRACEBACK = "Traceback (most recent call last):"
_POLL_S = 0.1
"""Interval at which the wait for a blocked output checks for late signals."""
HOLD_S = 1.5
"""Seconds for which a traceback is held back."""
HOLD_LINES = 400
"""Number of lines after which a held traceback is shown, for programs that print tracebacks without end."""


class Observer(Protocol):
    """Shows the progress of a job. If it raises OSError (its terminal is gone), the job continues without output."""

    def started(self, plan: LaunchPlan) -> None:
        """Called before the processes of an attempt start."""

    def event(self, event: Event) -> None:
        """Called with an event of the run. An event of a task other than the first concerns that task only."""

    def line(self, task: str, text: str) -> None:
        """Called with a line that a task printed."""

    def note(self, text: str) -> None:
        """Called with a message of the launcher."""

    def tick(self, now: float) -> None:
        """Called several times a second."""

    def ended(self) -> None:
        """Called when the processes of an attempt have ended."""


class Silent:
    """Shows nothing."""

    def started(self, plan: LaunchPlan) -> None: ...
    def event(self, event: Event) -> None: ...
    def line(self, task: str, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self, now: float) -> None: ...
    def ended(self) -> None: ...


class ThreadedObserver:
    """Calls an observer in a thread, in order, so that a blocked output does not block the job.

    An output is blocked if nobody reads it: a pager, a terminal after Ctrl-S, or a stuck log collector. Lines wait in a
    queue. If it is full, further lines are only counted; they are in the logs. The end of the outermost `with` waits
    until everything has been shown, so signals must be able to interrupt it. An exception of the observer other than
    OSError is raised by `tick`, `ended` or the end of the `with`. After an OSError nothing is shown.

    Args:
        max_characters: the size of the queue.
        late: the signals after the end of the job, which may end the wait for a blocked output.
    """

    def __init__(
        self, observer: Observer, max_characters: int = MAX_QUEUED_CHARACTERS, late: LateSignals | None = None
    ) -> None:
        self._observer, self._max_characters, self._late = observer, max_characters, late
        self._calls: SimpleQueue[tuple[str, tuple[object, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._num_users = 0
        self._error: BaseException | None = None
        self._tick_waits = False
        # each counter is written by one thread only
        self._queued_characters = self._shown_characters = self._num_dropped = 0

    @staticmethod
    def of(observer: Observer, late: LateSignals | None = None) -> ThreadedObserver:
        """Return a threaded observer. An observer that is already threaded is returned itself, to share its thread."""
        return observer if isinstance(observer, ThreadedObserver) else ThreadedObserver(observer, late=late)

    def started(self, plan: LaunchPlan) -> None:
        self._enqueue("started", plan)

    def event(self, event: Event) -> None:
        self._enqueue("event", event)

    def line(self, task: str, text: str) -> None:
        # after an overflow, wait until half of the queue is shown: this gives fewer notes about dropped lines
        limit = self._max_characters // 2 if self._num_dropped else self._max_characters
        if self._queued_characters - self._shown_characters >= limit:
            self._num_dropped += 1
            return
        self._report_dropped()
        self._queued_characters += LINE_OVERHEAD + len(text)
        self._enqueue("line", task, text)

    def note(self, text: str) -> None:
        self._enqueue("note", text)

    def tick(self, now: float) -> None:
        self._raise()
        # queue one tick at a time, so that ticks do not fill the queue of a blocked output
        if not self._tick_waits:
            self._tick_waits = True
            self._enqueue("tick", now)

    def ended(self) -> None:
        self._report_dropped()
        self._enqueue("ended")
        self._raise()

    def __enter__(self) -> ThreadedObserver:
        self._num_users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._num_users -= 1
        if not self._num_users and self._thread is not None:
            self._report_dropped()
            self._end(self._thread)
        self._raise()

    def _enqueue(self, method: str, *arguments: object) -> None:
        if self._thread is None:
            # a daemon thread does not keep the interpreter from exiting while it is blocked in a write
            self._thread = threading.Thread(target=self._show, name="view", daemon=True)
            self._thread.start()
        self._calls.put((method, arguments))

    def _report_dropped(self) -> None:
        if self._num_dropped:
            self._enqueue("note", f"the output was not read in time: {self._num_dropped:,} lines are only in the logs")
            self._num_dropped = 0

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _end(self, thread: threading.Thread) -> None:
        self._calls.put(None)
        try:
            while not self._over.wait(_POLL_S):
                if self._late is not None and self._late.end_waits():
                    atexit.register(self._late.exit)  # for the same reason as below
                    return
        except (KeyboardInterrupt, StopRequested) as stop:
            # a normal exit would wait for the lock of the output, which the blocked thread may hold forever
            code = ExitCode.PREEMPTED if isinstance(stop, StopRequested) else ExitCode.INTERRUPTED
            atexit.register(os._exit, code)
            raise
        thread.join()
        self._over.clear()
        self._thread = None

    def _show(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            if method == "tick":
                self._tick_waits = False
            try:
                getattr(self._observer, method)(*arguments)
            # the terminal or the reader is gone
            except OSError:
                self._observer = Silent()
            except BaseException as error:
                # `_raise` raises it in the main thread
                self._observer, self._error = Silent(), error
            if method == "line":
                self._shown_characters += LINE_OVERHEAD + len(str(arguments[1]))
        self._over.set()


class Screen:
    """Passes on the lines of tasks, except lines that the failure report repeats or that follow a failure.

    A traceback is held back for `HOLD_S`. If the run fails in that time, the report shows the traceback instead.
    Otherwise the program has handled the exception, and the traceback is shown. After a failure no lines are shown:
    they are usually consequences, and the logs have them.
    """

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._held: dict[str, tuple[float, list[str]]] = {}
        self.failed = False

    def line(self, task: str, text: str) -> None:
        if self.failed:
            return
        if task not in self._held and text.startswith(_TRACEBACK):
            self._held[task] = (self._clock(), [])
        if task not in self._held:
            self._show(task, text)
            return
        lines = self._held[task][1]
        lines.append(text)
        if len(lines) >= HOLD_LINES:
            self._release(task)

    def tick(self) -> None:
        """Show the tracebacks that have been held back for long enough."""
        for task in [task for task, (since, _) in self._held.items() if self._clock() >= since + HOLD_S]:
            self._release(task)

    def fail(self) -> None:
        """Stop showing lines after a failure."""
        self.failed = True
        self._held.clear()

    def close(self) -> None:
        """Show the tracebacks that are still held back. After `fail` there are none."""
        for task in list(self._held):
            self._release(task)

    def _release(self, task: str) -> None:
        for text in self._held.pop(task)[1]:
            self._show(task, text)
