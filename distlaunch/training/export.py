"""Writes a trained model for use elsewhere: `.keras` files and SavedModels, free of any strategy."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import keras

from distlaunch.config.run import RunConfig
from distlaunch.strategies.one_device import OneDevice
from distlaunch.strategies.protocol import Batch, State
from distlaunch.strategies.variables import state_variables
from distlaunch.training.build import build_model


def rebuild(config: RunConfig, state: State, rows: Batch) -> keras.Model:
    """The model on one device with the values of a snapshot; what was built before keeps working."""
    keras.utils.clear_session()  # so that layers get the same names as the first time
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


def export_model(model: keras.Model, directory: Path, formats: list[str]) -> dict[str, Path]:
    """Writes the model in each format; a file is replaced only when the new one is complete.

    Args:
        formats: of `keras` (one file) and `saved_model` (a folder with the signature `serve`).

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
            model.save(temporary)
        else:
            model.export(temporary, verbose=False)
        _remove(final)
        temporary.rename(final)
        written[name] = final
    return written


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
