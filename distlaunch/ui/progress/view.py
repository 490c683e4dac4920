"""Which view a command gets: a moving bar, plain lines, JSON lines, or nothing but errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

from distlaunch.base.events import Event
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.supervise.observer import Observer, Silent
from distlaunch.ui import report
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import event_line
from distlaunch.ui.progress.live import LiveView
from distlaunch.ui.progress.plain import PlainView
from distlaunch.ui.progress.state import ProgressState


class View(Observer, Protocol):
    """An observer that also knows how the job ended."""

    state: ProgressState

    def report(self, result: AttemptResult) -> None:
        """Prints what is to be known at the end of a training."""


class _Printing(Observer):
    """What each view that prints does in the same way. The view itself comes before it, and shows events and notes."""

    state: ProgressState
    _console: Console

    def catch_up(self, entries: Sequence[Event | str], most: int) -> None:
        """Takes in events and notes, and shows only the last lines that they make."""
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


class TerminalView(LiveView, _Printing):
    """For a terminal."""


class TextView(PlainView, _Printing):
    """For a file or a pipe."""


class QuietView(Silent):
    """Nothing but errors."""

    def __init__(self) -> None:
        self.state = ProgressState()

    def event(self, event: Event) -> None:
        self.state.add(event)

    def report(self, result: AttemptResult) -> None:
        _report_errors(self.state, result)


class JsonView(QuietView):
    """Events as JSON lines on standard output, and nothing else there."""

    def event(self, event: Event) -> None:
        super().event(event)
        print(event.to_json(), flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def make_view(*, as_json: bool = False, quiet: bool = False) -> View:
    """The view for what the user asked for and where the output goes."""
    if as_json:
        return JsonView()
    if quiet:
        return QuietView()
    return printing_view()


def printing_view() -> TerminalView | TextView:
    """The view that prints, for where the output goes."""
    console = JobConsole()
    return TerminalView(console) if console.is_terminal and not console.is_dumb_terminal else TextView(console)


def _makes_line(entry: Event | str) -> bool:
    return isinstance(entry, str) or event_line(entry, 1) is not None


def _report_errors(state: ProgressState, result: AttemptResult) -> None:
    with contextlib.suppress(OSError):
        console = JobConsole(stderr=True)
        report.print_warnings(console, result)
        report.print_failure(console, state, result)
