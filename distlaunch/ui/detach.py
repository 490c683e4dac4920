"""Messages about a launcher that continues without a terminal, and its own output."""

from __future__ import annotations

import json
from collections.abc import Callable

import click

from distlaunch.base.run_dir import RunDir
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import shown
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.view import TextView


class DetachedView(TextView):
    """Plain lines; `settle` is called when the tasks are about to start."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__(JobConsole(force_terminal=False))
        self._settle = settle

    def started(self, plan: LaunchPlan) -> None:
        self._settle()
        super().started(plan)


def print_detached(run: RunDir, pid: int, *, as_json: bool) -> None:
    """The run on standard output, for scripts; what to do with it beside."""
    where = shown(run.path)
    if as_json:
        click.echo(json.dumps({"run": str(run.path), "pid": pid}))
        return
    click.echo(where)
    click.echo(f"follow it  distlaunch logs {where} -f\nstop it    distlaunch stop {where}", err=True)
