"""`distlaunch predict`: what a run's model predicts, as a file of arrays."""

from __future__ import annotations

import os
from pathlib import Path

import click

from distlaunch.cli.options import JSON_EVENTS, OVERRIDES, QUIET
from distlaunch.errors import UsageError


@click.command("predict")
@click.argument("run", metavar="RUN")
@OVERRIDES
@click.option("--checkpoint", type=click.IntRange(min=0), metavar="STEP", help="Which checkpoint; default: the newest.")
@click.option("--split", type=click.Choice(["validation", "train"]), default="validation", show_default=True)
@click.option("--output", metavar="FILE", help="An .npz file, or .npy for one array; default: below the run directory.")
@JSON_EVENTS
@QUIET
def command(
    run: str,
    overrides: tuple[str, ...],
    checkpoint: int | None,
    split: str,
    output: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write what the model of a run's checkpoint predicts for every example of a split, in their order.

    Of a split that repeats for ever: of one epoch, or one validation. The file has one array, `predictions`, or one for
    each output of the model by its name. Runs under the run's own strategy (those of parameter servers on one device).
    """
    from distlaunch.launch import job
    from distlaunch.ui.view import finish_output, make_view

    extra = ["--split", split, *(["--checkpoint", str(checkpoint)] if checkpoint is not None else [])]
    if output is not None:
        extra += ["--output", str(_writable(output))]
    view = make_view(as_json=as_json, quiet=quiet)
    result = job.use_run(run, "predict", overrides, extra, view, os.environ)
    view.report(result)
    finish_output()
    return int(result.outcome.exit_code)


def _writable(output: str) -> Path:
    """The file, if there is hope that it can be written: found out now, not after the work."""
    path = Path(output).absolute()
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(f"--output {output}: expected a name that ends in .npz, or in .npy for a single array")
    if path.is_dir():
        raise UsageError(f"--output {output}: is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {output}: the folder {path.parent} cannot be written to")
    return path
