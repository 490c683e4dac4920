"""`distlaunch report`: reports on a run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from distlaunch.base.run_dir import BestName, RunDir, write_given_file
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import CheckpointName, PageFile, RunPath

_NEWEST = -1  # the value of the option without a step; real steps are not negative


@click.command("report", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html",
    type=PageFile(),
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Write the page of the run instead: to FILE, or to report.html in the run's directory.",
)
@click.option(
    "--checkpoint",
    type=CheckpointName(),
    is_flag=False,
    flag_value=_NEWEST,
    metavar="[STEP|best]",
    help="List the variables of a checkpoint instead: that of STEP, the best one, or the newest if neither is given.",
)
def command(run: str, as_json: bool, html: str | None, checkpoint: int | BestName | None) -> None:
    """Report on a run, using only its directory, whether it has ended or not.

    Shows attempts and why they failed, restarted tasks, the values of each epoch, the existing checkpoints, the
    evaluator's results, exports, and which parameter server or device holds which variable. With --checkpoint, shows
    the name, shape, type, size and norm (square root of the sum of squares) of each variable of a checkpoint. With
    --html, writes a page with curves, which opens offline in any browser; each run leaves one at its end.
    """
    from distlaunch.jobs.batch.job_states import state_of
    from distlaunch.runs.find import open_run
    from distlaunch.runs.report import read_report
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.run_report import print_report, report_json

    if checkpoint is not None:
        _list_checkpoint(open_run(run), None if checkpoint == _NEWEST else checkpoint, as_json=as_json)
        return
    found = open_run(run)
    if html is not None:
        from distlaunch.runs.paths import display_path
        from distlaunch.ui.html_report.page import page, write_page

        if not html:
            write_page(found, found.report)
            click.echo(display_path(found.report))
        elif write_given_file(Path(html), page(found)):
            click.echo(display_path(html))
        return
    report = read_report(found, state_of(found))
    if as_json:
        click.echo(report_json(report))
    else:
        print_report(JobConsole(), report)


def _list_checkpoint(run: RunDir, checkpoint: int | BestName | None, *, as_json: bool) -> None:
    from distlaunch.base import strict_json
    from distlaunch.jobs.list_checkpoint import list_checkpoint
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.run_report import print_checkpoint

    listing = list_checkpoint(run, checkpoint, os.environ)
    if as_json:
        click.echo(strict_json.dumps(listing, indent=2))
    else:
        print_checkpoint(JobConsole(), listing)
