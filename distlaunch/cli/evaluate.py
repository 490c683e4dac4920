"""`distlaunch evaluate`: computes the metrics of a run's checkpoint."""

from __future__ import annotations

import click

from distlaunch.base.run_dir import BestName
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import CHECKPOINT, JSON_EVENTS, OVERRIDES, QUIET, RunPath


@click.command("evaluate", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@OVERRIDES
@CHECKPOINT
@click.option("--split", type=click.Choice(["validation", "train"]), default="validation", show_default=True)
@JSON_EVENTS
@QUIET
def command(
    run: str, overrides: tuple[str, ...], checkpoint: int | BestName | None, split: str, as_json: bool, quiet: bool
) -> int:
    """Evaluate a checkpoint of a run on a split with the run's config, counting every example exactly once."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.use import run_on_checkpoint
    from distlaunch.ui.progress.view import make_view, show

    view = make_view(as_json=as_json, quiet=quiet, config=run)
    return show(
        view,
        lambda: run_on_checkpoint(run, "evaluate", overrides, ["--split", split], view, Machine.here(), checkpoint),
    )
