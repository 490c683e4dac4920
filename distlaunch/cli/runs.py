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
    r"""List the runs in DIR (default: runs), the newest last.

    \b
    running      its job is running
    pending      its submitted job waits in the queue, also after it was queued again; submitted: this machine cannot
                 ask the queue; cancelled: it left the queue without a start
    done         reached its planned end
    failed       a task failed
    stopped      by SIGTERM or `distlaunch stop`, with a checkpoint if a step was done; interrupted: by Ctrl-C
    killed       its launcher is gone; `train RUN --resume` continues from the last checkpoint, if there is one

    The values are those of the last complete epoch; before there is one, those so far. The time is from the run's
    first event to its last.
    """
    from distlaunch.jobs.batch.job_states import job_states
    from distlaunch.runs.listing import find_runs
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.plain import echo
    from distlaunch.ui.runs import print_runs, runs_json

    if as_json and directory == _DEFAULT and not Path(directory).exists():
        runs, closed = [], []  # nothing was trained here yet
    else:
        runs, closed = find_runs(Path(directory).absolute(), time.time(), job_states)
    if closed:
        echo(f"not readable for you: {', '.join(closed)}", err=True)
    if as_json:
        click.echo(runs_json(runs))
    elif runs:
        print_runs(JobConsole(), runs)
    else:
        echo(f"no runs in {directory}", err=True)
