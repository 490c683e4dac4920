"""What a run's tasks have printed and what has happened in it, shown from its files, now or while it goes on."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distlaunch.agent.log_noise import is_noise
from distlaunch.agent.output import LineSplitter
from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, TaskFailed
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.cluster.spec import Task
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.runs.paths import shown
from distlaunch.runs.report import KILLED, attempt_report
from distlaunch.supervise.event_facts import EventFollower
from distlaunch.supervise.observer import Observer

_CHUNK_BYTES = 1024 * 1024  # of a log file that may have gigabytes


@dataclass(frozen=True)
class Wish:
    """What of a run's logs to show.

    Attributes:
        attempt: None: the newest.
        task: lines of this one alone, without the run's events; None: of all, with them.
        lines: only so many of the last that are there already, of each file of each task, and of the run's events.
        raw: also what TensorFlow says to itself.
    """

    attempt: int | None = None
    task: str | None = None
    lines: int | None = None
    raw: bool = False


class LogView(Observer, Protocol):
    """An observer that can begin in the middle of a run."""

    def catch_up(self, told: Sequence[Event | str], most: int) -> None:
        """Takes in events and notes, and shows only the last lines that they make."""


class LogFollower:
    """Reads a log file that may still grow: each `read` gives the lines that were completed since the last."""

    def __init__(self, path: Path, *, raw: bool) -> None:
        self._path, self._raw = path, raw
        self._offset = 0
        self._splitter = LineSplitter()

    def read(self) -> Iterator[str]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while data := file.read(_CHUNK_BYTES):
                # before the lines are used: whoever stops in the middle does not see them twice
                self._offset += len(data)
                yield from self._wanted(self._splitter.feed(data))

    def rest(self) -> Iterator[str]:
        """The last line, if it has no end: nobody will write to the file any more."""
        yield from self._wanted(self._splitter.flush())

    def _wanted(self, lines: Sequence[str]) -> Iterator[str]:
        return (line for line in lines if self._raw or (line.strip() and not is_noise(line)))


class AttemptLogs:
    """Shows one attempt, from its beginning or its last lines."""

    def __init__(self, run: RunDir, attempt: int, wish: Wish, observer: LogView) -> None:
        plan = _plan_of(run, attempt)
        chosen = [task for task in plan.tasks if wish.task in (None, str(task.task))]
        if not chosen:
            names = ", ".join(str(task.task) for task in plan.tasks)
            raise UsageError(f"--task: got {wish.task!r}; attempt {attempt} of {shown(run.path)} has {names}")
        self.attempt, self._run, self._observer = attempt, run, observer
        self._logs = [
            (str(task.task), LogFollower(path, raw=wish.raw))
            for task in chosen
            for path in (task.files.stdout_log, task.files.stderr_log)
        ]
        self._events = None if wish.task else EventFollower(plan, from_now=False)
        observer.started(dataclasses.replace(plan, tasks=tuple(chosen)))

    def show(self, most: int | None = None) -> None:
        """What is new."""
        for task, log in self._logs:
            for line in log.read() if most is None else collections.deque(log.read(), most):
                self._observer.line(task, line)
        if most is not None:
            self._observer.catch_up(list(self._told()), most)
        for told in self._told():
            if isinstance(told, str):
                self._observer.note(told)
            else:
                self._observer.event(told)

    def _told(self) -> Iterator[Event | str]:
        """New events, and what the launcher itself has to say of them."""
        for event in self._events.read() if self._events else ():
            if self._events and self._events.is_for_show(event):
                yield event
            if isinstance(event, TaskFailed):
                where = f" on {event.host}" if event.host else ""
                yield f"{event.failed_task}{where}: {event.reason}"

    def close(self) -> None:
        """What is left, when nobody writes any more."""
        self.show()
        for task, log in self._logs:
            for line in log.rest():
                self._observer.line(task, line)
        self._observer.ended()

    def tell_end(self) -> None:
        """How the attempt has ended."""
        if self._events is None:
            return
        report = attempt_report(self._run, self.attempt, RunFacts.of(read_events(self._run.events)))
        if report.status == KILLED:
            self._observer.note("the launcher is gone without a word: killed, or lost with its machine")
        elif report.culprit == "config":
            self._observer.note(f"failed: {report.reason}")
        else:
            self._observer.note(report.status)


def show_logs(run: RunDir, wish: Wish, observer: LogView) -> None:
    """Shows what there is now."""
    logs = AttemptLogs(run, _attempt(run, wish), wish, observer)
    logs.show(wish.lines)
    logs.close()


def await_attempt(run: RunDir, wait: Callable[[], bool], goes_on: Callable[[], bool], after: int = -1) -> bool:
    """Waits until an attempt with a higher number is there; False: it does not come, or there is no reader."""
    while max(_attempts(run), default=-1) <= after:
        # asked first, so that an attempt that has come meanwhile is seen
        ended = not goes_on()
        if ended and max(_attempts(run), default=-1) <= after:
            return False
        if not wait():
            return False
    return True


def follow_logs(
    run: RunDir,
    wish: Wish,
    observer: LogView,
    wait: Callable[[], bool],
    goes_on: Callable[[], bool] = lambda: False,
) -> None:
    """Shows what there is and what comes, over restarts, until nobody works on the run, or the attempt, any more.

    Args:
        wait: passes a moment; tells whether there is still a reader.
        goes_on: whether somebody will work on the run again, such as a job in a queue.
    """
    logs = AttemptLogs(run, _attempt(run, wish), wish, observer)
    try:
        logs.show(wish.lines)
        while True:
            ended = not (run.is_busy() or goes_on())  # asked first, so that what is read then is all there is
            later = [number for number in _attempts(run) if number > logs.attempt]
            # a restart: the rest of the old attempt is shown first
            if later and wish.attempt is None:
                logs.close()
                observer.note(f"attempt {later[0]}")
                logs = AttemptLogs(run, later[0], wish, observer)
            elif ended or later:
                break
            logs.show()
            observer.tick(time.monotonic())
            if not wait():
                return
        logs.close()
        logs.tell_end()
    finally:
        observer.ended()


def _attempts(run: RunDir) -> list[int]:
    """Those whose tasks are known; of one that is just being prepared they are not yet."""
    return [number for number in run.attempts() if run.attempt_plan(number).exists() or run.tasks(number)]


def _attempt(run: RunDir, wish: Wish) -> int:
    attempts = _attempts(run)
    if not attempts:
        written = f"; see {shown(run.launcher_log)}" if run.launcher_log.exists() else ""
        raise UsageError(f"{shown(run.path)}: nothing has been started yet{written}")
    if wish.attempt is None:
        return attempts[-1]
    if wish.attempt not in attempts:
        raise UsageError(f"--attempt: got {wish.attempt}; {shown(run.path)} has {', '.join(map(str, attempts))}")
    return wish.attempt


def _plan_of(run: RunDir, attempt: int) -> LaunchPlan:
    """What an attempt has started, as far as it is needed to follow it."""
    names = list(run.tasks(attempt))
    chief = "chief:0" if "chief:0" in names else "worker:0"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a notebook's has no plan
        plain = json.loads(run.attempt_plan(attempt).read_text(encoding="utf-8"))
        names, chief = [str(task["task"]) for task in plain["tasks"]], str(plain["chief"])
    tasks = tuple(TaskPlan(Task.parse(name), (), {}, run.task(attempt, name)) for name in names)
    # without deadlines: nothing is started by it
    return LaunchPlan(run.path, attempt, "train", tasks, 0, 0, chief=Task.parse(chief))
