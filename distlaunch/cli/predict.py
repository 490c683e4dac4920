"""`distlaunch predict`: predictions of a model for a split of its run, or for any file or dataset."""

from __future__ import annotations

import os
from pathlib import Path

import click

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import CHECKPOINT, FILE, JSON_EVENTS, OVERRIDES, QUIET
from distlaunch.jobs.predict_export import PredictRequest, is_export, predict_export
from distlaunch.runs.find import run_named
from distlaunch.runs.paths import display_path

_BATCH_SIZE = 32  # the default of Keras's `predict`


@click.command("predict", cls=Command)
@click.argument("target", metavar="RUN|EXPORT", type=FILE)
@click.option(
    "--input", "input_file", metavar="FILE", type=FILE, help="Rows to predict: .npy, .npz, .csv, .tsv, .txt or .jsonl."
)
@click.option(
    "--data",
    metavar="FUNCTION",
    help="Predict the examples of a data function (module:name or file.py:name) or of tfds:NAME.",
)
@OVERRIDES
@CHECKPOINT
@click.option(
    "--split",
    type=click.Choice(["validation", "train"]),
    help="Default: validation; with --data, train if there is no validation split.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=FILE,
    help="An .npz file; .npy for a single array; - for JSON lines (exports only).",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help=f"Rows per batch, for an export. Default: {_BATCH_SIZE}."
)
@JSON_EVENTS
@QUIET
def command(
    target: str,
    input_file: str | None,
    data: str | None,
    overrides: tuple[str, ...],
    checkpoint: int | BestName | None,
    split: str | None,
    output: str | None,
    batch_size: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write a model's predictions, one row for each input row, in the same order.

    \b
    predict RUN                      every example of a split of the run, with a checkpoint
    predict EXPORT --input FILE      the rows of a file, with an export: a SavedModel, .keras or .tflite,
                                     or a run directory that has one; needs no other files of the run
    predict EXPORT --data FUNCTION   the examples of a dataset, with an export; if a run directory is given,
                                     its data.map is applied to each example

    Of a split that repeats forever, only the steps of one epoch or of one validation are read. The output file has one
    array, `predictions`, or one array for each named output of the model. A RUN predicts under its own strategy. The
    exception is a run with parameter servers: it predicts on one device.

    Input files: .npy for a single input, .npz for inputs by name, .csv and .tsv with a line of column names (the name
    of an input, or NAME_0, NAME_1 ... for its values), .txt with one text per line, .jsonl.
    """
    if not Path(target).exists() and (run := run_named(target)).exists():
        target = display_path(run.path)
    to_stdout = output == "-"
    path = None if output is None or to_stdout else _writable(output)
    if path is not None and input_file is not None and os.path.realpath(path) == os.path.realpath(input_file):
        raise UsageError(f"--output {output}: this is the input file; give another file")
    if input_file is None and data is None:
        _check_options_of_run(target, batch_size, to_stdout=to_stdout)
        extra = ["--split", split or "validation", *(["--output", str(path)] if path is not None else [])]
        return _predict_split(target, overrides, extra, checkpoint, as_json=as_json, quiet=quiet)
    _check_options_of_export(overrides, checkpoint, input_file, data, split, to_stdout=to_stdout, as_json=as_json)
    where = "-" if to_stdout else None if path is None else str(path)
    return _predict_rows(
        PredictRequest(target, input_file, data, split, where, batch_size or _BATCH_SIZE), as_json=as_json, quiet=quiet
    )


def _predict_rows(request: PredictRequest, *, as_json: bool, quiet: bool) -> int:
    """Predict given rows with an export."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.ui.plain import echo
    from distlaunch.ui.progress.view import make_view, reporting_errors

    view = make_view(as_json=as_json, quiet=quiet or request.output == "-", config=request.target)
    run = RunDir(request.target)
    view.begin(run if run.has_config() else None)
    with reporting_errors(view):
        # show warnings also with --quiet, since they concern the predictions
        view.event(predict_export(request, Machine.here(), lambda text: echo(text, err=True)))
    view.finished("done", 0)
    return 0


def _predict_split(
    run: str,
    overrides: tuple[str, ...],
    extra: list[str],
    checkpoint: int | BestName | None,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Predict a split of a run with a checkpoint."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.use import run_on_checkpoint
    from distlaunch.ui.progress.view import make_view, show

    view = make_view(as_json=as_json, quiet=quiet, config=run)
    return show(view, lambda: run_on_checkpoint(run, "predict", overrides, extra, view, Machine.here(), checkpoint))


def _check_options_of_run(target: str, batch_size: int | None, *, to_stdout: bool) -> None:
    """Raise UsageError for options that only an export accepts."""
    if is_export(target):
        raise UsageError(f"{target}: an export needs data to predict; add --input FILE or --data FUNCTION")
    if batch_size is not None or to_stdout:
        name = "--output -" if to_stdout else "--batch-size"
        raise UsageError(f"{name}: only for predictions of an export; add --input FILE or --data FUNCTION")


def _check_options_of_export(
    overrides: tuple[str, ...], checkpoint: int | BestName | None, input_file: str | None,
    data: str | None, split: str | None, *, to_stdout: bool, as_json: bool,
) -> None:  # fmt: skip
    """Raise UsageError for options that exclude each other."""
    if input_file is not None and data is not None:
        raise UsageError("got both --input and --data; give one of them")
    if overrides or checkpoint is not None:
        name = "--set" if overrides else "--checkpoint"
        given = "--input" if input_file is not None else "--data"
        raise UsageError(f"{name}: with {given}, an export is used, which has no config and no checkpoints; "
                         f"`distlaunch export RUN {name} ...` writes another export of a run")  # fmt: skip
    if split is not None and data is None:
        raise UsageError("--split: a file has no splits; leave out --split")
    if to_stdout and as_json:
        raise UsageError("--json: `--output -` already prints the predictions as JSON lines; leave out --json")


def _writable(output: str) -> Path:
    """Return the absolute path of an output file. Raise UsageError early if it probably cannot be written."""
    path = Path(output).absolute()
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(f"--output {output}: expected a name that ends in .npz, or in .npy for a single array")
    if path.is_dir():
        raise UsageError(f"--output {output} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {output}: the folder {path.parent} cannot be written to")
    return path
