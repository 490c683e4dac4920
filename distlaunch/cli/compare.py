"""`distlaunch compare`: shows runs side by side."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click

from distlaunch.base.errors import UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import REVERSE, SINCE, SORT, STATUS, RunPath


@click.command("compare", cls=Command)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunPath())
@STATUS
@SINCE
@SORT
@REVERSE
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all columns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a page with table and curves to FILE.",
)
def command(
    runs: tuple[str, ...], statuses: tuple[str, ...], since: float | None, sort: str | None, reverse: bool,
    as_csv: bool, as_json: bool, html: str | None,
) -> None:  # fmt: skip
    """Show runs side by side: the settings that differ, values, times and goodput.

    RUN is the path of a run, its name in the folder `runs`, a quoted pattern such as 'lr-*', or a folder of runs.
    Without RUN, all runs in `runs` are compared.

    For each metric, the table has the best value, with its epoch in brackets, and the value after the last complete
    epoch. The time does not include the pauses between attempts. Goodput is the share of the time, including pauses,
    that was spent in steps that count. On a terminal, columns that do not fit are left out; a line below the table
    names them.
    """
    from distlaunch.base.run_dir import write_given_file
    from distlaunch.jobs.batch.job_states import job_states
    from distlaunch.runs.find import filter_runs, named_runs
    from distlaunch.runs.known import read_runs
    from distlaunch.runs.order import sort_runs
    from distlaunch.ui.compare import comparison_csv, comparison_json, comparison_page, print_comparison
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.plain import echo

    if as_csv + as_json + (html is not None) > 1:
        raise click.UsageError("give only one of --csv, --json and --html")
    select = partial(filter_runs, statuses=statuses, since=since)
    found, warnings, num_left_out = read_runs(named_runs(runs), time.time(), job_states, select)
    if sort is not None:
        found = sort_runs(found, sort, reverse=reverse)
    elif reverse:
        found.reverse()
    for warning in warnings:
        echo(f"warning: {warning}", err=True)
    if len(found) < 2:
        only = f"only {found[0].summary.path}" if found else "none"
        left_out = f" ({num_left_out} left out by --status or --since)" if num_left_out else ""
        hint = "`distlaunch report RUN` shows one run"
        raise UsageError(f"a comparison needs at least two runs, got {only}{left_out}; {hint}")
    if (number := sum(run.has_values for run in found)) < 2:
        which = "no run has" if not number else "only one of these runs has"
        echo(f"note: {which} completed an epoch, so there are no values to compare", err=True)
    if html is not None:
        if write_given_file(Path(html), comparison_page(found, sort)):
            echo(html)
    elif as_csv:
        click.echo(comparison_csv(found), nl=False)
    elif as_json:
        click.echo(comparison_json(found))
    else:
        print_comparison(JobConsole(), found, sort)
