"""Writes a trained model for use elsewhere: `.keras` files and SavedModels, free of any strategy."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.errors import UsageError
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.one_device import OneDevice
from distlaunch.strategies.protocol import Batch, State
from distlaunch.strategies.variables import state_variables
from distlaunch.training.build import build_model
from distlaunch.training.preprocessing import Preprocessing


def rebuild(config: RunConfig, state: State, rows: Batch) -> keras.Model:
    """The model on one device with the values of a snapshot; what was built before keeps working."""
    with _building():
        model = build_model(config, OneDevice(), rows)
    for name, variable in state_variables(model).items():
        variable.assign(state[name])
    return model


def _building() -> contextlib.AbstractContextManager[None]:
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    from distlaunch.strategies.keras_on_jax import building

    return building()


def export_model(
    model: keras.Model, directory: Path, formats: list[str], preprocessing: Preprocessing | None = None
) -> dict[str, Path]:
    """Writes the model in each format; a file is replaced only when the new one is complete.

    Args:
        formats: of `keras` (one file) and `saved_model` (a folder with the signature `serve`).
        preprocessing: what a SavedModel's inputs go through before the model.

    Returns:
        Path by format.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in formats:
        final = directory / ("model.keras" if name == "keras" else "saved_model")
        temporary = directory / f".new_{final.name}"
        _remove(temporary)
        if name == "keras":
            _save(model, temporary)
        elif preprocessing is None:
            model.export(temporary, verbose=False)
        else:
            _export_with(preprocessing, model, temporary)
        _remove(final)
        temporary.rename(final)
        written[name] = final
    return written


def _save(model: keras.Model, path: Path) -> None:
    if isinstance(model, ModuleModel):
        raise UsageError("a .keras file cannot hold a tf.Module: export it as saved_model")
    model.save(path)


def _export_with(preprocessing: Preprocessing, model: Any, path: Path) -> None:
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.track(preprocessing.layer)
    for layer in preprocessing.layer._flatten_layers():
        for value in vars(layer).values():  # Keras tracks lookup tables, but no plain variables of TensorFlow
            if isinstance(value, tf.Variable):
                archive.track(value)
    archive.add_endpoint(
        "serve", lambda inputs: model(preprocessing.layer(inputs), training=False), input_signature=[preprocessing.raw]
    )
    archive.write_out(path, verbose=False)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
