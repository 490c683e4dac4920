"""Selects the examples of `distlaunch predict`, and writes the file with the predictions."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.folders import make_folder
from distlaunch.config.run import RunConfig
from distlaunch.data.split import Split


def split_in_order(config: RunConfig, name: str, train: Split, validation: Split | None, purpose: str
             ) -> tuple[Split, int | None]:  # fmt: skip
    """Return a split in the data function's order, and the number of its batches to read; None for all.

    The split is not shuffled, augmented or weighted, and nothing is dropped or skipped.

    Args:
        purpose: the use, such as `predict`, for error messages.

    Raises:
        ConfigError: there is no such split.
    """
    if name == "train":
        split, steps = train.in_order(), config.train.steps_per_epoch
    else:
        split, steps = validation, config.validation.steps if config.validation else None
    if split is None:
        raise ConfigError(Problem(("data",), f"there is no {name} split to {purpose}"))
    assert steps is not None or not split.endless, "the config of an endless split has a number of steps"
    return split, steps if split.endless else None


def named_arrays(predictions: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a structure by name.

    A name joins the keys and indices that lead to the array with `/`. A single array is named `predictions`.
    """
    if isinstance(predictions, np.ndarray):
        return {"predictions": predictions}
    return {"/".join(map(str, path)): leaf for path, leaf in keras.tree.flatten_with_path(predictions)}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file, or an .npy file for one array; the old file stays until the new one is complete.

    Raises:
        UsageError: the file cannot be written, or there are several arrays for an .npy file.
    """
    if path.suffix == ".npy" and len(arrays) > 1:
        raise UsageError(
            f"{path}: an .npy file holds only one array, but the model predicts {', '.join(arrays)}; use .npz"
        )
    plain = {name: _storable(array) for name, array in arrays.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_folder(path.parent)
        try:
            _write(temporary, path.suffix, plain)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path}: the predictions cannot be written: {error.strerror or error}") from None


def _write(path: Path, suffix: str, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        if suffix == ".npy":
            np.save(file, *arrays.values(), allow_pickle=False)
        else:
            _write_npz(file, arrays)
        file.flush()
        os.fsync(file.fileno())


def _write_npz(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file; unlike with `np.savez`, an array may have any name, such as `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # `force_zip64` allows arrays above 2 GiB, whose size zipfile does not know in advance
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _storable(array: np.ndarray) -> np.ndarray:
    """Return an array in a type that .npy files support: bfloat16 becomes float32, text becomes bytes."""
    # arrays of TensorFlow's strings contain Python objects, which need pickle
    if array.dtype.kind == "O":
        return array.astype(bytes)
    return array if array.dtype.kind in "biufcSU" else array.astype(np.float32)
