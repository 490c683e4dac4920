"""What `export` does: each format is made, checked in a clean process, and put in its place if it is good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from distlaunch.base.errors import DistlaunchError, reason_of
from distlaunch.base.run_dir import EXPORTS
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.patches.keras_private import layers_of
from distlaunch.serving.exported_model import named_outputs
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import has_own
from distlaunch.training.export.check import Finding, ModelFunction, Sample, check
from distlaunch.training.export.on_tensorflow import export_on_tensorflow
from distlaunch.training.export.writers import (
    export_backend,
    on_host,
    put_in_place,
    rebuild,
    save_keras,
    save_saved_model,
    save_weights,
    staging,
    takes_text,
)

CHECKED_ROWS = 3
"""Rows that a new export is called on: more than one, the batch size that TFLite files are made with."""
TOLERANCE = 1e-4
"""Of the largest value of an output: kernels of TFLite, and those of a CPU beside a GPU's, add in another order."""
_TOLERANCE_OF_HALVES = 3e-2  # bfloat16 has 8 bits
_PLAIN = "model_alone"
"""The SavedModel without preprocessing, from which a TFLite file is made if the preprocessing takes text."""


@dataclass(frozen=True)
class Trained:
    """What is to be exported.

    Attributes:
        state: values of the model's variables.
        rows: a few examples as the model gets them.
        raw: their inputs as the data function gave them, before the preprocessing.
    """

    config: RunConfig
    state: State
    rows: Batch
    raw: Any
    preprocessing: Preprocessing | None


@dataclass(frozen=True)
class Written:
    """One good export."""

    format: str
    path: Path
    signature: str
    notes: tuple[str, ...]


def export_all(trained: Trained, directory: Path, formats: Sequence[str], *, checked: bool) -> list[Written]:
    """Writes each format; one that is there is replaced only by a good one.

    Args:
        checked: load each in a clean process, and compare what it gives for a few rows.

    Raises:
        ExportError: some formats could not be made, or are of no use; the others are written.
    """
    model = rebuild(trained.config, trained.state, trained.rows)
    before, notes = trained.preprocessing, []
    alone = before is not None and takes_text(before)
    with staging(directory) as folder:
        files: dict[str, Path] = {name: folder / EXPORTS[name] for name in dict.fromkeys(formats)}
        for name, save in (("keras", save_keras), ("weights", save_weights)):
            if name in files:
                save(model, files[name])
        wanted = {"saved_model": before} if "saved_model" in files or ("tflite" in files and not alone) else {}
        if "tflite" in files and alone:
            wanted[_PLAIN] = None
            notes.append(f"{EXPORTS['tflite']} takes what data.preprocessing gives: TFLite has no texts")
        if export_backend().makes_saved_models:
            for name, layer in wanted.items():
                save_saved_model(model, folder / name, trained.rows, layer)
        elif wanted:
            export_on_tensorflow(trained.config, trained.state, trained.rows, folder, wanted)
        findings = {name: Finding("", None, ()) for name in files}
        # TFLite is converted in the clean process, so it takes part in any case
        if checked or "tflite" in files:
            to_convert = folder / (_PLAIN if alone else "saved_model")
            code = ModelFunction(trained.config.model.function, trained.config.model.args)
            sample, found = _sample(model, trained, with_preprocessing=() if alone else ("tflite",))
            findings = check(files, to_convert, sample, code, keras.backend.backend(), folder)
            notes += found
        return _put_in_place(files, directory, findings, tuple(notes))


class ExportError(DistlaunchError):
    """Exports are of no use. Attribute `written` has the good ones."""

    def __init__(self, message: str, written: list[Written]) -> None:
        super().__init__(message)
        self.written = written


def _put_in_place(
    files: dict[str, Path], directory: Path, findings: dict[str, Finding], notes: tuple[str, ...]
) -> list[Written]:
    written, problems = [], []
    for name, path in files.items():
        finding, final = findings[name], directory / EXPORTS[name]
        if finding.problem is not None:
            kept = "; the one that was there stays" if final.exists() else ""
            problems.append(f"the export as {name} failed its check and is not kept{kept}: {finding.problem}")
            continue
        put_in_place(path, final)
        # notes of one format begin with its file's name
        own = tuple(note for note in notes if note.startswith(path.name))
        written.append(Written(name, final, finding.signature, (*own, *finding.notes)))
    if problems:
        raise ExportError("; ".join(problems), written)
    shared = tuple(note for note in notes if not note.startswith(tuple(EXPORTS.values())))
    if shared and written:
        last = written[-1]
        written[-1] = Written(last.format, last.path, last.signature, (*last.notes, *shared))
    return written


def _sample(model: Any, trained: Trained, with_preprocessing: tuple[str, ...]) -> tuple[Sample, list[str]]:
    """What the exports are to give, and what is to be said about it."""
    x = keras.utils.unpack_x_y_sample_weight(trained.rows)[0]
    prepared, raw = _plain(x), _plain(trained.raw)
    first = ("saved_model", *with_preprocessing)
    rows = {name: raw if name in first else prepared for name in EXPORTS}
    if prepared is None:
        return Sample(rows, None, TOLERANCE), [_not_compared("its inputs are not plain arrays")]
    try:
        # twice: what differs from itself cannot be compared
        expected, again = _predict(model, prepared), _predict(model, prepared)
    # whatever the user's model raises; with Keras's own step it must have a forward pass
    except Exception as error:
        if not has_own(model, "train_step"):
            raise
        reason = reason_of(error)
        return Sample(rows, None, TOLERANCE), [_not_compared(f"it has a train_step, and no forward pass ({reason})")]
    kinds = {layer.compute_dtype for layer in layers_of(model) if getattr(layer, "compute_dtype", None)}
    tolerance = _TOLERANCE_OF_HALVES if kinds & {"float16", "bfloat16"} else TOLERANCE
    if any(not (expected[name] == again[name]).all() for name in expected if not _has_nan(expected[name])):
        return Sample(rows, None, tolerance), [_not_compared("it draws random numbers in predictions too")]
    return Sample(rows, expected, tolerance), []


def _not_compared(why: str) -> str:
    return f"the exports were loaded, but not compared with the model: {why}"


def _has_nan(array: Any) -> bool:
    # NaN alone differs from itself
    return bool(array.dtype.kind == "f" and (array != array).any())


def _plain(x: Any) -> Any:
    """Arrays in the same structure; None if some are ragged or sparse."""
    if not all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(x)):
        return None
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), x)


def _predict(model: Any, x: Any) -> dict[str, Any]:
    with export_backend().exact_products():
        texts = any(leaf.dtype.kind == "O" for leaf in tf.nest.flatten(x))
        return named_outputs(model(tf.nest.map_structure(tf.constant, x) if texts else x, training=False), on_host)
