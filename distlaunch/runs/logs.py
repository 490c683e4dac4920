"""Shows the output of a run's tasks and its events from its files, once or while the run continues."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from distlaunch.agent.log_noise import is_noise
from distlaunch.agent.output import LineSplitter
from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import read_run_sample
from distlaunch.base.events import Event, ExportFailed, TaskFailed
from distlaunch.base.protocol import RUN_MODES
from distlaunch.base.regular_files import NotRegularError, open_regular, read_json
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.cluster.spec import Task
from distlaunch.plan.train import LaunchPlan, Mode, TaskPlan
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import KILLED, attempt_report
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.run_events import EventFollower

_CHUNK_BYTES = 1024 * 1024  # read at once from a log file, which may have gigabytes


@dataclass(frozen=True)
class LogSelection:
    """The part of a run's logs to show.

    Attributes:
        attempt: number of the attempt; None for the newest.
        task: show only the lines of this task; None for all tasks and the run's events.
        lines: show only this many of the existing lines of each log file and of the events; None for all.
        raw: whether to show TensorFlow's own messages.
    """

    attempt: int | None = None
    task: str | None = None
    lines: int | None = None
    raw: bool = False


class LogView(Observer, Protocol):
    """An observer that can begin in the middle of a run."""

    def catch_up(self, entries: Sequence[Event | str], most: int) -> None:
        """Update the state with all events, but print only the last `most` lines of events and notes."""


class LogFollower:
    """Reads a log file that may still grow. Each `read` yields the lines completed since the previous one."""

    def __init__(self, path: Path, *, raw: bool) -> None:
        self._path, self._raw = path, raw
        self._offset = 0
        self._splitter = LineSplitter()

    def read(self) -> Iterator[str]:
        try:
            file = open_regular(self._path)
        except (FileNotFoundError, NotRegularError):
            return
        with file:
            file.seek(self._offset)
            while data := file.read(_CHUNK_BYTES):
                # advance before yielding: a caller that stops in the middle must not get lines twice
                self._offset += len(data)
                yield from self._visible(self._splitter.feed(data))

    def rest(self) -> Iterator[str]:
        """Yield the last line if it has no line break. Call this when nobody writes to the file."""
        yield from self._visible(self._splitter.flush())

    def _visible(self, lines: Sequence[str]) -> Iterator[str]:
        return (line for line in lines if self._raw or (line.strip() and not is_noise(line)))


class AttemptLogs:
    """Shows one attempt, from its beginning or its last lines."""

    def __init__(self, run: RunDir, attempt: int, selection: LogSelection, observer: LogView) -> None:
        plan = _plan_of(run, attempt)
        chosen = [task for task in plan.tasks if selection.task in (None, str(task.task))]
        if not chosen:
            names = ", ".join(str(task.task) for task in plan.tasks)
            raise UsageError(
                f"--task: got {selection.task!r}; attempt {attempt} of {display_path(run.path)} has {names}"
            )
        self.attempt, self._run, self._observer = attempt, run, observer
        self._logs = [
            (str(task.task), LogFollower(path, raw=selection.raw))
            for task in chosen
            for path in (task.files.stdout_log, task.files.stderr_log)
        ]
        self._events = None if selection.task else EventFollower(plan, from_now=False)
        observer.started(dataclasses.replace(plan, tasks=tuple(chosen)))

    def show(self, most: int | None = None) -> None:
        """Show new lines and events.

        Args:
            most: show only the last `most` lines of each log file and of the events.
        """
        for task, log in self._logs:
            for line in log.read() if most is None else collections.deque(log.read(), most):
                self._observer.line(task, line)
        if most is not None:
            self._observer.catch_up(list(self._new_entries()), most)
        for entry in self._new_entries():
            if isinstance(entry, str):
                self._observer.note(entry)
            else:
                self._observer.event(entry)

    def _new_entries(self) -> Iterator[Event | str]:
        """Yield new events, and messages about failures."""
        for event in self._events.read() if self._events else ():
            if self._events and self._events.is_for_show(event):
                yield event
            if isinstance(event, ExportFailed):
                yield f"the export failed: {event.reason}"
            if isinstance(event, TaskFailed):
                where = f" on {event.host}" if event.host else ""
                yield f"{event.failed_task}{where}: {event.reason}"

    def close(self) -> None:
        """Show the remaining lines. Call this when nobody writes to the files."""
        self.show()
        for task, log in self._logs:
            for line in log.rest():
                self._observer.line(task, line)
        self._observer.ended()

    def note_end(self) -> None:
        """Show how the attempt has ended."""
        if self._events is None:
            return
        report = attempt_report(self._run, self.attempt, RunFacts.of(read_run_sample(self._run)))
        if report.status == KILLED:
            self._observer.note("the launcher is gone: it was killed, or its machine failed")
        elif report.culprit == "config":
            self._observer.note(f"failed: {report.reason}")
        else:
            self._observer.note(report.status)


def show_logs(run: RunDir, selection: LogSelection, observer: LogView) -> None:
    """Show the existing lines and events."""
    logs = AttemptLogs(run, _select_attempt(run, selection), selection, observer)
    logs.show(selection.lines)
    logs.close()


def await_attempt(run: RunDir, wait: Callable[[], bool], is_active: Callable[[], bool], after: int = -1) -> bool:
    """Wait for an attempt with a number above `after`.

    Returns:
        False if no attempt comes, or the output has no reader.
    """
    while max(_attempts(run), default=-1) <= after:
        # query first: an attempt may start during the query
        ended = not is_active()
        if ended and max(_attempts(run), default=-1) <= after:
            return False
        if not wait():
            return False
    return True


def follow_logs(
    run: RunDir,
    selection: LogSelection,
    observer: LogView,
    wait: Callable[[], bool],
    is_active: Callable[[], bool] = lambda: False,
) -> None:
    """Show new lines and events until the run has ended, across restarts, or until the selected attempt has ended.

    Args:
        wait: waits a moment; returns False if the output has no reader.
        is_active: returns True if a submitted job may still work on the run.
    """
    logs = AttemptLogs(run, _select_attempt(run, selection), selection, observer)
    try:
        logs.show(selection.lines)
        while True:
            ended = not (run.is_busy() or is_active())  # query first: what is read afterwards is complete
            later = [number for number in _attempts(run) if number > logs.attempt and _is_training(run, number)]
            # after a restart, show the rest of the old attempt first
            if later and selection.attempt is None:
                logs.close()
                observer.note(f"attempt {later[0]}")
                logs = AttemptLogs(run, later[0], selection, observer)
            elif ended or later:
                break
            logs.show()
            observer.tick(time.monotonic())
            if not wait():
                return
        logs.close()
        logs.note_end()
    finally:
        observer.ended()


def _attempts(run: RunDir) -> list[int]:
    """Return the attempts whose tasks are known. While an attempt is prepared, its tasks are unknown."""
    return [number for number in run.attempts() if run.attempt_plan(number).exists() or run.tasks(number)]


def _is_training(run: RunDir, attempt: int) -> bool:
    """Return True if an attempt trains or runs a script, rather than using the trained model."""
    return _plan_of(run, attempt).mode in RUN_MODES


def _select_attempt(run: RunDir, selection: LogSelection) -> int:
    """Return the attempt to show: the selected one, else the newest that trained, else the newest."""
    attempts = _attempts(run)
    if not attempts:
        written = f"; see {display_path(run.launcher_log)}" if run.launcher_log.exists() else ""
        raise UsageError(f"{display_path(run.path)}: nothing has been started yet{written}")
    if selection.attempt is None:
        trained = [number for number in attempts if _is_training(run, number)]
        return (trained or attempts)[-1]
    if selection.attempt not in attempts:
        raise UsageError(
            f"--attempt: got {selection.attempt}; {display_path(run.path)} has {', '.join(map(str, attempts))}"
        )
    return selection.attempt


def _plan_of(run: RunDir, attempt: int) -> LaunchPlan:
    """Return the plan of an attempt, with only the parts that are needed to follow it."""
    names = list(run.tasks(attempt))
    mode: Mode = "train"
    chief = "chief:0" if "chief:0" in names else "worker:0"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # attempts of notebooks have no plan
        plain = read_json(run.attempt_plan(attempt))
        names, chief = [str(task["task"]) for task in plain["tasks"]], str(plain["chief"])
        mode = cast(Mode, plain["mode"])
    tasks = tuple(TaskPlan(Task.parse(name), (), {}, run.task(attempt, name)) for name in names)
    # the timeouts are 0, since nothing is started with this plan
    return LaunchPlan(run.path, attempt, mode, tasks, 0, 0, chief=Task.parse(chief))
