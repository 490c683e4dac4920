"""Where callbacks write: in the run directory, so that no run writes over the files of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from distlaunch.base.folders import make_folder
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.scalars import RUN_DIR

_PATHS = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "TensorBoard": "log_dir",
}
"""The argument of each of Keras's callbacks that is a path."""


def arguments_in(run: RunDir, factory: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a callback, with `${run_dir}` filled in.

    Relative paths start from the run directory where an argument is known to be one: in Keras's callbacks, and in
    classes that are derived from them.
    """
    found = {name: _filled_in(value, str(run.path)) for name, value in args.items()}
    argument = _path_argument(factory)
    if argument == "log_dir":
        found.setdefault(argument, str(run.tensorboard))
    path = found.get(argument)
    # an address of object storage, such as gs://, is left to Keras
    if isinstance(path, str) and "://" not in path:
        own = run.own(path)
        found[argument] = str(own)
        if argument == "filename" and own.is_relative_to(run.path):
            make_folder(own.parent)  # the others make their folders themselves
    return found


def _path_argument(factory: Any) -> str:
    classes = ((getattr(keras.callbacks, name, None), argument) for name, argument in _PATHS.items())
    is_class = isinstance(factory, type)
    return next((argument for found, argument in classes if is_class and found and issubclass(factory, found)), "")


def _filled_in(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {name: _filled_in(inner, path) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled_in(inner, path) for inner in value]
    return value.replace(RUN_DIR, path) if isinstance(value, str) else value
