"""`distlaunch plan`: prints the processes that `train` would start."""

from __future__ import annotations

import json
import sys

import click

from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, OVERRIDES


@click.command("plan", cls=Command)
@click.argument("target", metavar="CONFIG|RUN", type=FILE)
@OVERRIDES
@click.option("--name", help="Name of the run directory. Default: the config's.")
@click.option("--resume", is_flag=True, help="Plan a resume, like `train --resume`.")
@click.option(
    "--variables/--no-variables",
    default=True,
    show_default=True,
    help="Build the model and show which task or device holds which variable, unless all hold the same variables.",
)
@click.option("--data", "with_data", is_flag=True, help="Read the data and show which task reads which examples.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    target: str,
    overrides: tuple[str, ...],
    name: str | None,
    resume: bool,
    variables: bool,
    with_data: bool,
    as_json: bool,
) -> None:
    """Show what `train` would start: each process, its environment and its logs. Starts no tasks, and writes nothing.

    With --resume, the first line (with --json, the field `note`) names the run that would be resumed, and says what
    it lacks.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs import job
    from distlaunch.jobs.choose_run import JobRequest
    from distlaunch.jobs.describe import describe_data, describe_variables
    from distlaunch.plan.train import describe_plan_ports, plan_json, render_plan
    from distlaunch.ui.data_overview import data_lines
    from distlaunch.ui.placement import placement_sections
    from distlaunch.ui.plain import echo
    from distlaunch.ui.tables import line_style_for

    machine = Machine.here()
    plan, choice = job.plan(JobRequest(target, overrides, name, resume), machine)
    for warning in (*choice.warnings, *(plan.warnings if plan is not None else ())):
        echo(f"warning: {warning}", err=True)
    if choice.note and not as_json:
        echo(choice.note)
    if plan is None:  # the run has finished, so nothing would start
        if as_json:
            click.echo(
                json.dumps({"run_dir": str(choice.target_run_dir.path), "tasks": [], "note": choice.note}, indent=2)
            )
        return
    placed = describe_variables(choice.config, choice.locate, machine) if variables else None
    data = describe_data(choice.config, choice.locate, machine) if with_data else None
    if as_json:
        click.echo(plan_json(plan, placed, data, choice.note, describe_plan_ports(plan, choice.config)))
        return
    echo(render_plan(plan, choice.config))
    if placed is not None:
        for section in placement_sections(placed.variables, placed.mesh, line_style_for(sys.stdout.encoding)):
            echo("\n".join(["", *section]))
    if data is not None:
        echo("\n".join(["", *data_lines(data)]))
