"""The views of a command: a moving bar, plain lines, JSON lines, or only errors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import click
from rich.console import Console

from distlaunch.base.errors import DistlaunchError, StopRequested, about_run, code_of_os_error, message_of
from distlaunch.base.events import LAUNCHER, CommandEnded, CommandStarted, Event
from distlaunch.base.protocol import EVENT_FORMAT
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_mask import SecretMask
from distlaunch.base.visible import visible
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import display_path
from distlaunch.supervise.observer import Observer, Silent
from distlaunch.ui import report
from distlaunch.ui.ci import annotate_failure
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import event_line
from distlaunch.ui.progress.live import LiveView, PlainView
from distlaunch.ui.progress.state import ProgressState


class View(Observer, Protocol):
    """An observer that also reports how the job has ended."""

    state: ProgressState

    def begin(self, run: RunDir | None) -> None:
        """Called first, if the run is known before its attempt starts. The run is None if the command uses no run."""

    def report(self, result: AttemptResult) -> None:
        """Print the report at the end of a training."""

    def finished(self, status: str, exit_code: int, reason: str = "") -> None:
        """Called last, with the status and exit code of the command, and why it failed."""


class _Printing(Observer):
    """Mixin of the views that print."""

    state: ProgressState
    _console: Console

    def catch_up(self, entries: Sequence[Event | str], most: int) -> None:
        """Update the state with all events, but print only the last `most` lines of events and notes."""
        remaining = sum(_makes_line(each) for each in entries)
        for each in entries:
            if isinstance(each, Event):
                (self.event if remaining <= most else self.state.add)(each)
            elif remaining <= most:
                self.note(each)
            remaining -= _makes_line(each)

    def report(self, result: AttemptResult) -> None:
        with contextlib.suppress(OSError):  # if the output is gone, the exit code still reports the result
            if result.plan.is_run:
                report.print_summary(self._console, self.state, result)
            elif self.state.evaluated is not None:
                report.print_metrics(self._console, self.state.evaluated.logs, self.state.evaluated.split)
        _report_errors(self.state, result)

    def begin(self, run: RunDir | None) -> None: ...

    def finished(self, status: str, exit_code: int, reason: str = "") -> None: ...


class TerminalView(LiveView, _Printing):
    """The view for a terminal."""


class TextView(PlainView, _Printing):
    """The view for a file or a pipe."""


class QuietView(Silent):
    """The view that prints only errors."""

    def __init__(self) -> None:
        self.state = ProgressState()

    def event(self, event: Event) -> None:
        self.state.add(event)

    def begin(self, run: RunDir | None) -> None: ...

    def report(self, result: AttemptResult) -> None:
        _report_errors(self.state, result)

    def finished(self, status: str, exit_code: int, reason: str = "") -> None: ...


class JsonView(QuietView):
    """Prints events as JSON lines on standard output, and nothing else there.

    Args:
        config: the config or run given to the command, for the first event.
    """

    def __init__(self, config: str = "") -> None:
        super().__init__()
        self._config, self._begun, self._run = config, False, ""

    def started(self, plan: LaunchPlan) -> None:
        if not self._begun:
            # the attempt of a read-only run has a temporary run directory
            self.begin(RunDir(self._config if plan.is_reader else plan.run_dir))

    def begin(self, run: RunDir | None) -> None:
        self._begun = True
        path = "" if run is None else str(run.path)
        self._run = display_path(path)
        recorded = None if run is None else run.recorded_identity()
        if recorded is not None:
            name, number = recorded.name, recorded.number
        else:
            name, number = "" if run is None else run.name, None
        _print_event(CommandStarted(run=path, name=name, number=number, config=self._config))

    def finished(self, status: str, exit_code: int, reason: str = "") -> None:
        if not self._begun:
            self.begin(None)
        reason = SecretMask(os.environ).whole(reason)
        _print_event(CommandEnded(status=status, exit_code=exit_code, reason=reason))

    def event(self, event: Event) -> None:
        super().event(event)
        _print(event)

    def note(self, text: str) -> None:
        # the name of the run distinguishes the messages of several runs
        print(about_run(self._run, text), file=sys.stderr, flush=True)


def _print(event: Event) -> None:
    print(event.to_json(), flush=True)


def _print_event(event: Event) -> None:
    """Print an event of the command itself, which is not recorded in a file."""
    _print(dataclasses.replace(event, time=time.time(), task=LAUNCHER, format_version=EVENT_FORMAT))


@contextlib.contextmanager
def reporting_errors(view: View) -> Generator[None]:
    """Report to the view an error that ends the command, and raise it again."""
    try:
        yield
    except StopRequested as asked:
        view.finished("stopped", asked.exit_code)
        raise
    except (DistlaunchError, OSError) as error:
        code = code_of_os_error(error) if isinstance(error, OSError) else error.exit_code
        view.finished("failed", int(code), message_of(error))
        raise


def show(view: View, work: Callable[[], AttemptResult | None]) -> int:
    """Do the work of a command, show how it ended, and return its exit code.

    Args:
        work: returns the last attempt, or None if there was nothing to do.
    """
    with reporting_errors(view):
        result = work()
    if result is not None:
        view.report(result)
    if result is None:
        view.finished("done", 0)
        return 0
    code = int(result.outcome.exit_code)
    view.finished(result.outcome.status, code, why_failed(result))
    return code


def why_failed(result: AttemptResult) -> str:
    """Return the error message of a failed command, or an empty string."""
    if not result.outcome.exit_code:
        return ""
    return report.failure_line(result) or "\n".join(report.warning_lines(result))


def make_view(*, as_json: bool = False, quiet: bool = False, config: str = "") -> View:
    """Return the view for the options of the user and the kind of output.

    Args:
        config: the config or run of the command.
    """
    if as_json:
        return JsonView(config)
    if quiet:
        return QuietView()
    return printing_view()


def printing_view() -> TerminalView | TextView:
    """Return the view for the kind of standard output: a terminal, or a file or pipe."""
    console = JobConsole()
    return TerminalView(console) if console.writes_to_terminal and not console.is_dumb_terminal else TextView(console)


def _makes_line(entry: Event | str) -> bool:
    return isinstance(entry, str) or event_line(entry, 1) is not None


def _report_errors(state: ProgressState, result: AttemptResult) -> None:
    with contextlib.suppress(OSError):
        console = JobConsole(stderr=True)
        report.print_warnings(console, result)
        report.print_failure(console, state, result)
    if (failure := result.outcome.failure) is not None:
        annotate_failure(report.failure_line(result), failure)


class DetachedView(TextView):
    """Prints plain lines, and calls `settle` when the tasks are about to start."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__(JobConsole(force_terminal=False))
        self._settle = settle

    def started(self, plan: LaunchPlan) -> None:
        self._settle()
        super().started(plan)


class NotesView(QuietView):
    """Prints notes on standard error, since standard output is for the path of the run."""

    def note(self, text: str) -> None:
        click.echo(visible(text), err=True)


def print_detached(run: RunDir, pid: int | None, *, as_json: bool) -> None:
    """Print the run on standard output, for scripts, and commands for the run on standard error.

    Args:
        pid: the launcher's process ID; None if the run has already finished.
    """
    where = display_path(run.path)
    if as_json:
        click.echo(json.dumps({"run": str(run.path), "pid": pid}))
        return
    click.echo(where)
    if pid is not None:
        click.echo(f"follow it  distlaunch logs {where} -f\nstop it    distlaunch stop {where}", err=True)
