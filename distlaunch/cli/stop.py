"""`distlaunch stop`: ends a run that is going on."""

from __future__ import annotations

import click

from distlaunch.cli.options import Seconds


@click.command("stop")
@click.argument("run", metavar="RUN")
@click.option("--now", is_flag=True, help="Do not wait for the step and the checkpoint, as Ctrl-C twice.")
@click.option("--timeout", type=Seconds(min=0), metavar="S", help="Wait so long at most; default: no limit.")
def command(run: str, now: bool, timeout: float | None) -> None:
    """Stop a run that is going on, with a checkpoint after the current step, and wait until it has ended.

    The launcher ends as it does at SIGTERM, with exit code 4; `train RUN --resume` goes on.
    A run that is not going on is left as it is, with exit code 0.
    """
    from distlaunch.jobs.stop import stop_run
    from distlaunch.runs.listing import summarize
    from distlaunch.runs.report import open_run
    from distlaunch.ui.runs import how_it_ended

    found = open_run(run)
    stopped = stop_run(found, at_once=now, timeout_s=timeout)
    click.echo(how_it_ended(summarize(found), stopped=stopped))
