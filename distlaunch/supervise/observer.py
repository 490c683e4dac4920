"""The interface through which the launcher reports its progress, and which lines of tasks it shows."""

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

ROOM = 16_000_000
"""Characters of tasks' lines that may wait to be shown: 4,000 of the longest lines, some 50,000 usual ones."""
LINE_ROOM = 200
"""Overhead of a line in characters."""
_TRACEBACK = "Traceback (most recent call last):"
HOLD_S = 1.5
HOLD_LINES = 400  # a program that prints tracebacks without end is shown, too


class Observer(Protocol):
    """Takes what there is to show. An OSError from it (a terminal that is gone) ends the showing, not the job."""

    def started(self, plan: LaunchPlan) -> None:
        """Called before the processes of an attempt start."""

    def event(self, event: Event) -> None:
        """Called with an event of the run; those of other tasks than the first are about these tasks only."""

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
    """Passes on to an observer, in order and without waiting for it, for as long as that can show anything.

    A thread calls the observer: an output that nobody reads (a pager, Ctrl-S, a stuck collector) holds it, and not the
    job. Lines wait while there is room; others are left to the logs, and counted. The end of the outermost `with` waits
    until everything has been shown, as every program waits for those who read its output; signals should not be held
    back then. An exception of the observer that is no OSError is raised by `tick`, `ended` or the end of the `with`.
    """

    def __init__(self, observer: Observer, room: int = ROOM) -> None:
        self._observer, self._room = observer, room
        self._calls: SimpleQueue[tuple[str, tuple[object, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._num_users = 0
        self._error: BaseException | None = None
        self._tick_waits = False
        # each is counted by one thread alone
        self._given = self._taken = self._num_dropped = 0

    @staticmethod
    def of(observer: Observer) -> ThreadedObserver:
        """Return the observer itself if it is one already, so that its users share a thread."""
        return observer if isinstance(observer, ThreadedObserver) else ThreadedObserver(observer)

    def started(self, plan: LaunchPlan) -> None:
        self._enqueue("started", plan)

    def event(self, event: Event) -> None:
        self._enqueue("event", event)

    def line(self, task: str, text: str) -> None:
        # once it is full, half of it must be shown first: few notes with many lines each
        if self._given - self._taken >= (self._room // 2 if self._num_dropped else self._room):
            self._num_dropped += 1
            return
        self._report_dropped()
        self._given += LINE_ROOM + len(text)
        self._enqueue("line", task, text)

    def note(self, text: str) -> None:
        self._enqueue("note", text)

    def tick(self, now: float) -> None:
        self._raise()
        # one at a time is enough, and they must not fill the queue of a screen that hangs
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
            # daemon: held by a write, it would keep the interpreter from ending
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
            self._over.wait()
        except (KeyboardInterrupt, StopRequested) as stop:
            # the interpreter's own end wants the lock of the output, which the thread may hold for ever: it would abort
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
            # a terminal or a reader that is gone
            except OSError:
                self._observer = Silent()
            except BaseException as error:
                # raised in the main thread, by whoever calls next
                self._observer, self._error = Silent(), error
            # counted here and not in `line`: each number has one thread that writes it
            if method == "line":
                self._taken += LINE_ROOM + len(str(arguments[1]))
        self._over.set()


class Screen:
    """Passes lines on, except those that a failure makes superfluous: they stay in the logs.

    A traceback is held back for a moment. If its task fails, the report shows it once and in full; if not, it was one
    that the program lives with, and it is shown. After a failure the other tasks' complaints are not shown at all.
    """

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._held: dict[str, tuple[float, list[str]]] = {}
        self._failed = False

    def line(self, task: str, text: str) -> None:
        if self._failed:
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
        """Show what has been held back for long enough."""
        for task in [task for task, (since, _) in self._held.items() if self._clock() >= since + HOLD_S]:
            self._release(task)

    def fail(self) -> None:
        """Stop showing lines after a failure: the report and the logs have them."""
        self._failed = True
        self._held.clear()

    def close(self) -> None:
        """Show what is left, since no failure came."""
        for task in list(self._held):
            self._release(task)

    def _release(self, task: str) -> None:
        for text in self._held.pop(task)[1]:
            self._show(task, text)
