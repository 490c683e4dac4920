"""`distlaunch runs`: lists runs and their status, and removes runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distlaunch.base.errors import ExitCode, UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FOLDER, REVERSE, SINCE, SORT, STATUS

if TYPE_CHECKING:
    from distlaunch.runs.known import KnownRun

_DEFAULT = "runs"


@click.command("runs", cls=Command)
@click.argument("directory", metavar="[DIR]", type=FOLDER, default=_DEFAULT)
@STATUS
@click.option(
    "--name", "names", multiple=True, metavar="PATTERN",
    help="List only runs whose folder matches a quoted pattern such as 'lr-*'. May be repeated.",
)  # fmt: skip
@SINCE
@SORT
@REVERSE
@click.option("--follow", "-f", is_flag=True, help="Show a live table until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@click.option(
    "--remove", is_flag=True, help="Delete the listed runs with their checkpoints, after asking. Running ones are kept."
)
@click.option("--yes", is_flag=True, help="With --remove: do not ask.")
@click.option("--dry-run", is_flag=True, help="With --remove: only print what would be deleted.")
def command(
    directory: str, statuses: tuple[str, ...], names: tuple[str, ...], since: float | None, sort: str | None,
    reverse: bool, follow: bool, as_json: bool, remove: bool, yes: bool, dry_run: bool,
) -> int:  # fmt: skip
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

    The last values are those of the last complete epoch, or the values so far in the first epoch; best values have
    their epoch in brackets. Settings that differ between the listed runs have a column each. The time is that from the
    start of the run's first process to its last event, without the pauses between attempts. On a terminal, columns that
    do not fit are left out; `compare` shows more about values.
    """
    from distlaunch.jobs.batch.job_states import job_states
    from distlaunch.runs.find import filter_runs
    from distlaunch.runs.known import with_settings
    from distlaunch.runs.listing import find_runs
    from distlaunch.runs.order import sort_runs
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.plain import echo
    from distlaunch.ui.runs import follow_runs, print_runs, runs_json

    if sum((follow, as_json, remove)) > 1:
        raise click.UsageError("--follow, --json and --remove exclude each other")
    if (yes or dry_run) and not remove:
        raise click.UsageError("--yes and --dry-run need --remove")
    if remove and not (statuses or names or since is not None):
        raise UsageError("--remove needs --status, --name or --since, to say which runs; for one run: --name NAME")

    def listed() -> tuple[list[KnownRun], list[str]]:
        if (as_json or follow) and directory == _DEFAULT and not Path(directory).exists():
            return [], []  # no run has been made here yet
        needs_goodput = as_json or sort == "goodput"
        found, unreadable = find_runs(Path(directory).absolute(), time.time(), job_states, goodput=needs_goodput)
        runs, _ = with_settings(filter_runs(found, statuses=statuses, names=names, since=since))
        # a live table waits for the first values instead of refusing the name of a metric
        if sort is not None and runs and (not follow or any(run.has_values for run in runs)):
            runs = sort_runs(runs, sort, reverse=reverse)
        elif reverse:
            runs.reverse()
        return runs, unreadable

    if follow:
        console = JobConsole()
        if not console.writes_to_terminal:
            raise UsageError("--follow needs a terminal; `distlaunch runs --json` prints the state once")
        follow_runs(console, lambda: listed()[0], sort, reverse=reverse)
    runs, unreadable = listed()
    if unreadable:
        echo(f"permission denied: {', '.join(unreadable)}", err=True)
    if as_json:
        click.echo(runs_json(runs))
    elif not runs:
        limits = " that matches" if statuses or names or since is not None else "s"
        echo(f"no run{limits} in {directory}", err=True)
    elif remove:
        return _remove(runs, asks=not yes, dry_run=dry_run)
    else:
        print_runs(JobConsole(), runs, sort)
    return ExitCode.DONE


def has_terminal() -> bool:
    """Return True if a user can answer a question."""
    return sys.stdin.isatty()


def _remove(runs: Sequence[KnownRun], *, asks: bool, dry_run: bool) -> int:
    """Remove runs, unless they are running; return the exit code."""
    from distlaunch.base.plural import count
    from distlaunch.base.run_dir import RunDir
    from distlaunch.jobs.batch.job_states import job_states
    from distlaunch.runs.paths import display_path
    from distlaunch.runs.removal import folder_bytes, reason_to_keep, remove_run
    from distlaunch.ui import words
    from distlaunch.ui.plain import echo

    folders = [RunDir(run.summary.path) for run in runs]
    states = job_states([job for folder in folders if (job := folder.live_submission())])
    reasons = {
        run.summary.path: reason_to_keep(folder, run.summary.status, states)
        for run, folder in zip(runs, folders, strict=True)
    }
    sizes = {path: folder_bytes(Path(path)) for path, reason in reasons.items() if not reason}
    for path, reason in reasons.items():
        if reason:
            echo(f"kept     {display_path(path)}: {reason}", err=True)
    if not sizes:
        echo("there is nothing to remove", err=True)
        return ExitCode.DONE
    total = f"{count(len(sizes), 'run')} ({words.size(sum(sizes.values()))})"
    if dry_run or asks:
        for path, size in sizes.items():
            echo(f"{'would remove' if dry_run else 'remove'}  {display_path(path)}  ({words.size(size)})")
    if dry_run:
        echo(f"would remove {total}; nothing was removed")
        return ExitCode.DONE
    if asks:
        if not has_terminal():
            raise UsageError("nothing was removed: --remove asks first, but there is no terminal to answer; add --yes")
        if not click.confirm(f"Remove {total} for good?"):
            echo("nothing was removed")
            return ExitCode.DONE
    code = ExitCode.DONE
    for path in sizes:
        if reason := remove_run(RunDir(path)):
            echo(f"error: {display_path(path)}: {reason}", err=True)
            code = ExitCode.FAILED
        else:
            echo(f"removed  {display_path(path)}")
    return code
