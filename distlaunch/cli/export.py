"""`distlaunch export`: writes a run's model."""

from __future__ import annotations

import os

import click

from distlaunch.cli.options import JSON_EVENTS, OVERRIDES, QUIET


@click.command("export")
@click.argument("run", metavar="RUN")
@OVERRIDES
@click.option("--checkpoint", type=click.IntRange(min=0), metavar="STEP", help="Which checkpoint; default: the newest.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["keras", "saved_model"]),
    help="May be repeated. Default: the formats of the config's `export`, or keras.",
)
@JSON_EVENTS
@QUIET
def command(
    run: str, overrides: tuple[str, ...], checkpoint: int | None, formats: tuple[str, ...], as_json: bool, quiet: bool
) -> int:
    """Write the model of a run's checkpoint as .keras or SavedModel, below the run directory."""
    from distlaunch.launch import job
    from distlaunch.ui.view import finish_output, make_view

    view = make_view(as_json=as_json, quiet=quiet)
    chosen = ["--formats", ",".join(dict.fromkeys(formats))] if formats else []
    extra = [*chosen, *(["--checkpoint", str(checkpoint)] if checkpoint is not None else [])]
    result = job.use_run(run, "export", overrides, extra, view, os.environ)
    view.report(result)
    finish_output()
    return int(result.outcome.exit_code)
