"""`distlaunch export`: exports a run's model."""

from __future__ import annotations

import click

from distlaunch.base.run_dir import BestName
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import CHECKPOINT, JSON_EVENTS, OVERRIDES, QUIET, RunPath


@click.command("export", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@OVERRIDES
@CHECKPOINT
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["saved_model", "keras", "weights", "tflite"]),
    help="May be given several times. Default: the config's `export`, or else keras (saved_model for a tf.Module).",
)
@JSON_EVENTS
@QUIET
def command(
    run: str,
    overrides: tuple[str, ...],
    checkpoint: int | BestName | None,
    formats: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> int:
    """Export the model of a checkpoint to the run directory, whichever strategy trained it.

    \b
    saved_model  a folder with the signature `serve`, which includes data.preprocessing (text in, scores out)
    keras        model.keras, for keras.saving.load_model
    weights      model.weights.h5, for load_weights of the model that the config's function returns
    tflite       model.tflite, for any batch size; without data.preprocessing if that takes text

    Each export is loaded in a new process and compared with the trained model on some rows of the training data. It
    replaces an older export only if the outputs agree within 1e-4 of the largest value (16-bit layers: 3e-2).
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.use import run_on_checkpoint
    from distlaunch.ui.progress.view import make_view, show

    view = make_view(as_json=as_json, quiet=quiet, config=run)
    chosen = ["--formats", ",".join(dict.fromkeys(formats))] if formats else []
    return show(view, lambda: run_on_checkpoint(run, "export", overrides, chosen, view, Machine.here(), checkpoint))
