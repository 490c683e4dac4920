"""`distlaunch stop`: stops a running job."""

from __future__ import annotations

import click

from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import RunPath, Seconds


@click.command("stop", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@click.option("--now", is_flag=True, help="Do not wait for the step and its checkpoint, like Ctrl-C twice.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="Wait at most this many seconds. Default: no limit.")
def command(run: str, now: bool, timeout: float | None) -> None:
    """Stop a running job after the current step, with a checkpoint, and wait until it has ended.

    The job exits with code 4, as after SIGTERM; `train RUN --resume` continues it. If the run is not running, nothing
    happens and the exit code is 0. A submitted job is stopped through its queue and not requeued; if it is still
    pending, it is cancelled.
    """
    from distlaunch.jobs.batch.job_states import state_of
    from distlaunch.jobs.stop import stop_run
    from distlaunch.runs.find import open_run
    from distlaunch.runs.listing import summarize
    from distlaunch.runs.paths import display_path
    from distlaunch.ui.plain import echo
    from distlaunch.ui.runs import how_it_ended

    found = open_run(run, may_wait=True)
    stopped = stop_run(found, at_once=now, timeout_s=timeout)
    if stopped and not found.exists():
        echo(f"{display_path(found.path)}: stopped before any task was started")
        return
    summary = summarize(found, job=state_of(found))
    echo(how_it_ended(summary, stopped=stopped, has_checkpoint=bool(found.checkpoint_steps())))
