"""`distlaunch runs`: lists runs and their status."""

from __future__ import annotations

import time
from pathlib import Path

import click

from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FOLDER

_DEFAULT = "runs"


@click.command("runs", cls=Command)
@click.argument("directory", metavar="[DIR]", type=FOLDER, default=_DEFAULT)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def command(directory: str, as_json: bool) -> None:
    """List the runs in DIR (default: runs), the newest last.

    \b
    running      the job is running
    pending      the submitted job waits in the queue, perhaps after a requeue
    submitted    the job was submitted, but this machine cannot query the queue
    cancelled    the submitted job was removed from the queue before it started
    done         the run has reached its planned end
    failed       a task has failed
    stopped      stopped by SIGTERM or `distlaunch stop`, with a checkpoint if at least one step was done
    interrupted  stopped in the same way by Ctrl-C
    killed       the launcher is gone; `train RUN --resume` continues from the last checkpoint, if there is one

    The values are those of the last complete epoch, or the values so far in the first epoch. The time is that from the
    run's first event to its last.
    """
    from distlaunch.jobs.batch.job_states import job_states
    from distlaunch.runs.listing import find_runs
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.plain import echo
    from distlaunch.ui.runs import print_runs, runs_json

    if as_json and directory == _DEFAULT and not Path(directory).exists():
        runs, unreadable = [], []  # no run has been made here yet
    else:
        runs, unreadable = find_runs(Path(directory).absolute(), time.time(), job_states)
    if unreadable:
        echo(f"permission denied: {', '.join(unreadable)}", err=True)
    if as_json:
        click.echo(runs_json(runs))
    elif runs:
        print_runs(JobConsole(), runs)
    else:
        echo(f"no runs in {directory}", err=True)
