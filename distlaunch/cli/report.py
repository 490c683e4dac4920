"""`distlaunch report`: how a run went."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: str, as_json: bool) -> None:
    """Report on a run from its directory alone, whether it has ended or not.

    Shows attempts and why they failed, restarted tasks, the values of each epoch, the checkpoints that are kept, the
    evaluator's results, exports, and which parameter server or device holds which variable.
    """
    from distlaunch.runs.report import open_run, read_report
    from distlaunch.ui.console import JobConsole
    from distlaunch.ui.run_report import print_report, report_json

    report = read_report(open_run(run))
    if as_json:
        click.echo(report_json(report))
    else:
        print_report(JobConsole(), report)
