"""Exports a model: writes each format, checks it in a clean process, and moves it into place if the check passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import DistlaunchError, reason_of
from distlaunch.base.run_dir import EXPORTS
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.structures import flatten, map_structure
from distlaunch.patches.keras_private import layers_of
from distlaunch.patches.tensorflow_late import is_a, tf
from distlaunch.serving.clean_check import FIXED_NOTE
from distlaunch.serving.exported_model import named_outputs
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import overrides_method
from distlaunch.training.export.check import Finding, ModelFunction, Sample, check
from distlaunch.training.export.on_tensorflow import export_on_tensorflow
from distlaunch.training.export.writers import (
    SavedModels,
    WantedModel,
    export_backend,
    has_open_sizes,
    on_host,
    put_in_place,
    rebuild,
    recorded,
    save_keras,
    save_saved_models,
    save_weights,
    staging,
    takes_text,
)

CHECKED_ROWS = 3
"""Number of rows that a new export is called with; not 1, the batch size that TFLite files are made with."""
TOLERANCE = 1e-4
"""Allowed deviation, relative to the largest value of an output.

TFLite adds numbers in another order than TensorFlow, and a CPU in another order than a GPU.
"""
_TOLERANCE_16_BIT = 3e-2  # bfloat16 has 8 bits
_WITHOUT_PREPROCESSING = "model_alone"
"""Name of the SavedModel without preprocessing, used for the TFLite file if the preprocessing takes text."""
_FIXED_SIZES = "fixed_sizes"
"""Name of the SavedModel for inputs of the sizes of a few examples, used for the TFLite file if TFLite needs it."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model to be exported.

    Attributes:
        state: values of the model's variables.
        rows: a few examples in the form that the model takes.
        raw: inputs of the same examples before preprocessing, as the data function returned them.
        sizes: an `ArraySpec` for each input of the model, whose sizes are None if they may differ between batches; None
            if that is unknown.
    """

    config: RunConfig
    state: State
    rows: Batch
    raw: Any
    preprocessing: Preprocessing | None
    sizes: Any = None


@dataclass(frozen=True)
class WrittenExport:
    """An export that passed its check."""

    format: str
    path: Path
    signature: str
    notes: tuple[str, ...]


def export_all(trained: TrainedModel, directory: Path, formats: Sequence[str], *, checked: bool) -> list[WrittenExport]:
    """Write each format; an existing export is replaced only by one that passed its check.

    Args:
        checked: whether to load each export in a clean process, and compare its outputs for a few rows.

    Raises:
        ExportError: some formats could not be written or failed their check; the other formats are written.
    """
    model = rebuild(trained.config, trained.state, trained.rows)
    before, notes = trained.preprocessing, []
    takes_strings = before is not None and takes_text(before)
    with staging(directory) as folder:
        files: dict[str, Path] = {name: folder / EXPORTS[name] for name in dict.fromkeys(formats)}
        failures: dict[str, str] = {}
        for name, save in (("keras", save_keras), ("weights", save_weights)):
            if name in files:
                with recorded(failures, name):
                    save(model, files[name])
        if "keras" in files and before is not None:
            notes.append(f"{EXPORTS['keras']} takes the output of data.preprocessing; saved_model includes its layer")
        wanted: dict[str, WantedModel] = {}
        if "saved_model" in files or ("tflite" in files and not takes_strings):
            wanted["saved_model"] = WantedModel(before, trained.sizes)
        if "tflite" in files and takes_strings:
            wanted[_WITHOUT_PREPROCESSING] = WantedModel(None, trained.sizes)
            notes.append(f"{EXPORTS['tflite']} takes the output of data.preprocessing: TFLite does not support text")
        to_convert = _WITHOUT_PREPROCESSING if takes_strings else "saved_model"
        may_be_fixed = to_convert in wanted and wanted[to_convert].layer is None and has_open_sizes(trained.sizes)
        if "tflite" in files and may_be_fixed:
            wanted[_FIXED_SIZES] = WantedModel(None)
        made = _save_saved_models(model, trained, folder, wanted)
        if "saved_model" in files and "saved_model" in made.failures:
            failures["saved_model"] = made.failures["saved_model"]
        if "tflite" in files and to_convert in made.failures:
            is_repeated = failures.get("saved_model") == made.failures[to_convert]
            failures["tflite"] = "it is made from the SavedModel" if is_repeated else made.failures[to_convert]
        written = {name: path for name, path in files.items() if name not in failures}
        # also about the TFLite file that is made from it
        notes += [
            f"{EXPORTS[name]} {FIXED_NOTE}"
            for name in ("saved_model", "tflite")
            if name in files and ("saved_model" if name == "saved_model" else to_convert) in made.fixed
        ]
        findings = {name: Finding("", None, ()) for name in written}
        # the clean process also makes TFLite files
        if written and (checked or "tflite" in written):
            code = ModelFunction(trained.config.model.function, trained.config.model.args)
            sample, found = _sample(model, trained, with_preprocessing=() if takes_strings else ("tflite",))
            has_fallback = _FIXED_SIZES in wanted and _FIXED_SIZES not in made.failures and to_convert not in made.fixed
            findings = check(written, folder / to_convert, sample, code, keras.backend.backend(), folder,
                             fallback=folder / _FIXED_SIZES if has_fallback else None)  # fmt: skip
            notes += found
        return _put_in_place(files, directory, findings, failures, tuple(notes))


def _save_saved_models(
    model: keras.Model, trained: TrainedModel, folder: Path, wanted: dict[str, WantedModel]
) -> SavedModels:
    if not wanted or export_backend().makes_saved_models:
        return save_saved_models(model, folder, trained.rows, wanted)
    try:
        return export_on_tensorflow(trained.config, trained.state, trained.rows, folder, wanted)
    except DistlaunchError as error:
        return SavedModels([], dict.fromkeys(wanted, str(error)))


class ExportError(DistlaunchError):
    """Some exports failed; the attribute `written` holds the successful ones."""

    def __init__(self, message: str, written: list[WrittenExport]) -> None:
        super().__init__(message)
        self.written = written


def _put_in_place(
    files: dict[str, Path],
    directory: Path,
    findings: dict[str, Finding],
    failures: dict[str, str],
    notes: tuple[str, ...],
) -> list[WrittenExport]:
    written, problems = [], []
    for name, path in files.items():
        final = directory / EXPORTS[name]
        kept = "; the previous one is kept" if final.exists() else ""
        if name in failures:
            problems.append(f"the export as {name} could not be written{kept}: {failures[name]}")
            continue
        finding = findings[name]
        if finding.problem is not None:
            problems.append(f"the export as {name} failed its check and was deleted{kept}: {finding.problem}")
            continue
        put_in_place(path, final)
        # notes about one format begin with the name of its file
        own = tuple(note for note in notes if note.startswith(path.name))
        written.append(WrittenExport(name, final, finding.signature, (*own, *finding.notes)))
    if problems:
        raise ExportError("; ".join(problems), written)
    shared = tuple(note for note in notes if not note.startswith(tuple(EXPORTS.values())))
    if shared and written:
        last = written[-1]
        written[-1] = WrittenExport(last.format, last.path, last.signature, (*last.notes, *shared))
    return written


def _sample(model: Any, trained: TrainedModel, with_preprocessing: tuple[str, ...]) -> tuple[Sample, list[str]]:
    """Return rows with the expected outputs, and notes about the comparison."""
    x = keras.utils.unpack_x_y_sample_weight(trained.rows)[0]
    prepared, raw = _as_numpy(x), _as_numpy(trained.raw)
    first = ("saved_model", *with_preprocessing)
    rows = {name: raw if name in first else prepared for name in EXPORTS}
    if prepared is None:
        return Sample(rows, None, TOLERANCE), [_not_compared("its inputs are not plain arrays")]
    try:
        # called twice, because outputs that differ between two calls cannot be compared
        expected, again = _predict(model, prepared), _predict(model, prepared)
    # only a model with its own step may lack a forward pass
    except Exception as error:
        if not overrides_method(model, "train_step"):
            raise
        reason = reason_of(error)
        return Sample(rows, None, TOLERANCE), [_not_compared(f"it has a train_step, but no forward pass ({reason})")]
    compute_dtypes = {layer.compute_dtype for layer in layers_of(model) if getattr(layer, "compute_dtype", None)}
    tolerance = _TOLERANCE_16_BIT if compute_dtypes & {"float16", "bfloat16"} else TOLERANCE
    if any(not (expected[name] == again[name]).all() for name in expected if not _has_nan(expected[name])):
        return Sample(rows, None, tolerance), [_not_compared("its predictions use random numbers")]
    return Sample(rows, expected, tolerance), []


def _not_compared(why: str) -> str:
    return f"the exports were loaded, but not compared with the model: {why}"


def _has_nan(array: Any) -> bool:
    # only NaN differs from itself
    return bool(array.dtype.kind == "f" and (array != array).any())


def _as_numpy(x: Any) -> Any:
    """Return NumPy arrays in the same structure, or None if some tensors are ragged or sparse."""
    if not all(isinstance(leaf, np.ndarray) or is_a(leaf, "Tensor") for leaf in flatten(x)):
        return None
    return map_structure(np.asarray, x)


def _predict(model: Any, x: Any) -> dict[str, Any]:
    with export_backend().exact_products():
        texts = any(leaf.dtype.kind == "O" for leaf in flatten(x))
        return named_outputs(model(map_structure(tf.constant, x) if texts else x, training=False), on_host)
