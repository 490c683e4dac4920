"""Messages about a launcher that continues without a terminal, and its own output."""

from __future__ import annotations

import json
from collections.abc import Callable

import click

from distlaunch.base.run_dir import RunDir
from distlaunch.base.visible import visible
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import shown
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.view import QuietView, TextView


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
        pid: of the launcher; None if the run has already finished.
    """
    where = shown(run.path)
    if as_json:
        click.echo(json.dumps({"run": str(run.path), "pid": pid}))
        return
    click.echo(where)
    if pid is not None:
        click.echo(f"follow it  distlaunch logs {where} -f\nstop it    distlaunch stop {where}", err=True)
