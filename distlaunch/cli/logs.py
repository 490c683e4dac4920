"""`distlaunch logs`: shows the output of a run's tasks."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable

import click

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.standard_streams import output_error
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import RunPath

_POLL_INTERVAL_MS = 200  # the delay after which new lines are shown
_WRITE_S = 0.5
"""Time for tasks to write their stacks, which `faulthandler` does as soon as the signal arrives."""


@click.command("logs", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@click.option("--follow", "-f", is_flag=True, help="Keep following, across restarts, until the run ends.")
@click.option("--task", metavar="TASK", help="Show only this task, e.g. worker:1.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of the attempt to show. Default: the newest that trained; with -f also later ones.",
)
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the last N lines of each log file, and of the events.",
)
@click.option("--raw", is_flag=True, help="Include TensorFlow's own messages.")
@click.option("--stacks", is_flag=True, help="First ask each running task to write its Python stacks to its error log.")
def command(
    run: str, follow: bool, task: str | None, attempt: int | None, lines: int | None, raw: bool, stacks: bool
) -> None:
    """Show the output of a run's tasks, each line with the name of its task, and the events of the run.

    Log files have no timestamps, so without -f the output comes task by task, followed by the events. Exits with 0 when
    the run has ended, whatever its status, and with 130 on Ctrl-C. The run may also be a submitted job that is
    still waiting in its queue.
    """
    from distlaunch.runs.find import open_run
    from distlaunch.runs.logs import LogSelection, await_attempt, follow_logs, show_logs
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.progress.view import TextView, printing_view

    found, selection = open_run(run), LogSelection(attempt, task, lines, raw)
    if stacks:
        _write_stacks(found)
    if follow:
        view = printing_view() if task is None else TextView(JobConsole())
        is_active = _make_job_check(found, view.note)
        if not found.attempts():
            await_attempt(found, wait_a_moment, is_active)
        follow_logs(found, selection, view, wait_a_moment, is_active)
    else:
        _check_started(found)
        show_logs(found, selection, TextView(JobConsole()))


def _write_stacks(run: RunDir) -> None:
    from distlaunch.jobs.stop import ask_for_stacks
    from distlaunch.runs.paths import display_path

    if not ask_for_stacks(run):
        raise UsageError(f"--stacks: {display_path(run.path)} is not running, so there are no stacks to show")
    time.sleep(_WRITE_S)


def _make_job_check(run: RunDir, note: Callable[[str], None]) -> Callable[[], bool]:
    """Return a function that returns True while the run has a submitted job that has not ended."""
    from distlaunch.jobs.batch.job_states import JobWatch, live_job

    job = live_job(run)
    return JobWatch(run, job[0], note).is_active if job else lambda: False


def _check_started(run: RunDir) -> None:
    from distlaunch.jobs.batch.job_states import live_job
    from distlaunch.runs.paths import display_path

    if not run.attempts() and (found := live_job(run)) is not None:
        job, state = found
        raise UsageError(
            f"{display_path(run.path)}: nothing has been started yet; job {job.job}: {state}; `logs -f` waits"
        )


def wait_a_moment() -> bool:
    """Wait a moment; return False at once if the output has no reader, as in `logs -f | head`."""
    if output_error() is not None:
        return False
    poll = select.poll()
    # with no event requested, `poll` still reports errors, such as a pipe without a reader
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(_POLL_INTERVAL_MS)
