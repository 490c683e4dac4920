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
from distlaunch.base.events import CommandEnded, CommandStarted, Event
from distlaunch.base.protocol import EVENT_FORMAT
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_mask import SecretMask
from distlaunch.base.visible import visible
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import display_path
from distlaunch.supervise.observer import Observer, Silent
from distlaunch.supervise.run_events import LAUNCHER
from distlaunch.ui import report
from distlaunch.ui.ci import annotate_failure
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import event_line
from distlaunch.ui.progress.live import LiveView, PlainView
from distlaunch.ui.progress.state import ProgressState


class View(Observer, Protocol):
    """An observer that also knows how the job ended."""

    state: ProgressState

    def begin(self, run: RunDir | None) -> None:
        """Called first, if the run is known before its attempt starts. None: the command uses no run."""

    def report(self, result: AttemptResult) -> None:
        """Print the report at the end of a training."""

    def finished(self, status: str, exit_code: int, reason: str = "") -> None:
        """Called last, with how the command ends, and why it failed."""


class _Printing(Observer):
    """Mixin of the views that print."""

    state: ProgressState
    _console: Console

    def catch_up(self, entries: Sequence[Event | str], most: int) -> None:
        """Read events and notes, and show only the last lines that they make."""
        left = sum(_makes_line(each) for each in entries)
        for each in entries:
            if isinstance(each, Event):
                (self.event if left <= most else self.state.add)(each)
            elif left <= most:
                self.note(each)
            left -= _makes_line(each)

    def report(self, result: AttemptResult) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more; the exit code still says how it ended
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
    """Nothing but errors."""

    def __init__(self) -> None:
        self.state = ProgressState()

    def event(self, event: Event) -> None:
        self.state.add(event)

    def begin(self, run: RunDir | None) -> None: ...

    def report(self, result: AttemptResult) -> None:
        _report_errors(self.state, result)

    def finished(self, status: str, exit_code: int, reason: str = "") -> None: ...


class JsonView(QuietView):
    """Events as JSON lines on standard output, and nothing else there.

    Args:
        config: what the command was given, a config or a run, for its first line.
    """

    def __init__(self, config: str = "") -> None:
        super().__init__()
        self._config, self._begun, self._run = config, False, ""

    def started(self, plan: LaunchPlan) -> None:
        if not self._begun:
            # of a run that may only be read, the attempt's folder is another
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
        # beside the messages of other runs
        print(about_run(self._run, text), file=sys.stderr, flush=True)


def _print(event: Event) -> None:
    print(event.to_json(), flush=True)


def _print_event(event: Event) -> None:
    """Print an event of the command itself, which is in no file."""
    _print(dataclasses.replace(event, time=time.time(), task=LAUNCHER, format_version=EVENT_FORMAT))


@contextlib.contextmanager
def reporting_errors(view: View) -> Generator[None]:
    """Make an error that ends the command the last event, too."""
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
    """Return why a command has failed, as standard error has it; empty if it has not."""
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
    """Return the view that prints to this kind of output."""
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
    """Plain lines; `settle` is called when the tasks are about to start."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__(JobConsole(force_terminal=False))
        self._settle = settle

    def started(self, plan: LaunchPlan) -> None:
        self._settle()
        super().started(plan)


class NotesView(QuietView):
    """Notes on standard error: standard output is for the run alone."""

    def note(self, text: str) -> None:
        click.echo(visible(text), err=True)


def print_detached(run: RunDir, pid: int | None, *, as_json: bool) -> None:
    """Print the run on standard output, for scripts, and what to do with it beside.

    Args:
        pid: of the launcher; None: the run is finished already, and there is none.
    """
    where = display_path(run.path)
    if as_json:
        click.echo(json.dumps({"run": str(run.path), "pid": pid}))
        return
    click.echo(where)
    if pid is not None:
        click.echo(f"follow it  distlaunch logs {where} -f\nstop it    distlaunch stop {where}", err=True)
