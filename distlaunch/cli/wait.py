"""`distlaunch wait`: waits until runs have ended."""

from __future__ import annotations

import json

import click

from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import QUIET, RunPath


@click.command("wait", cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each run as it ends.")
@QUIET
def command(runs: tuple[str, ...], as_json: bool, quiet: bool) -> int:
    """Wait until runs have ended, across restarts and requeues, and exit with the worst of their codes.

    A run has ended when no launcher works on it and no job for it is queued. From worst to best, the codes are 2, 3,
    75, 4 and 0. A run whose launcher was killed counts as 75. A signal ends only this command, not the runs.
    """
    from distlaunch.jobs.batch.job_states import state_of
    from distlaunch.jobs.wait import wait_for_runs
    from distlaunch.runs.final_code import worst_code
    from distlaunch.runs.find import open_run
    from distlaunch.runs.listing import summarize
    from distlaunch.runs.paths import display_path
    from distlaunch.ui.plain import echo

    found = [open_run(run, may_wait=True) for run in runs]
    codes: list[int] = []
    for run, code in wait_for_runs(found, lambda text: None if quiet or as_json else echo(text, err=True)):
        codes.append(code)
        if as_json or not quiet:
            status = summarize(run, job=state_of(run)).status if run.exists() else "stopped"
            plain = {"run": str(run.path), "status": status, "exit_code": int(code)}
            click.echo(json.dumps(plain)) if as_json else echo(
                f"{display_path(run.path)}: {status}, exit code {int(code)}"
            )
    return int(worst_code(codes))
