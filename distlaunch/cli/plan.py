"""`distlaunch plan`: prints what `train` would start."""

from __future__ import annotations

import os

import click

from distlaunch.cli.options import OVERRIDES


@click.command("plan")
@click.argument("target", metavar="CONFIG|RUN")
@OVERRIDES
@click.option("--name", help="Name of the run directory, instead of the config's.")
@click.option("--resume", is_flag=True, help="As in `train`.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(target: str, overrides: tuple[str, ...], name: str | None, resume: bool, as_json: bool) -> None:
    """Print what `train` would start: each process, its environment, its logs. Starts and writes nothing."""
    from distlaunch.launch import job
    from distlaunch.launch.plan import plan_json, render_plan

    plan, config = job.plan(job.Request(target, overrides, name, resume), os.environ)
    click.echo(plan_json(plan) if as_json else render_plan(plan, config))
