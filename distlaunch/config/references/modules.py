"""Finds a module's source file without importing user code."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from distlaunch.base.user_modules import modules_folder
from distlaunch.config.read.words import did_you_mean
from distlaunch.config.run import RunConfig


class ModuleMissingError(Exception):
    """There is no such module. The message names the places that were searched."""


def program_of(config: RunConfig) -> str:
    """Return the `sys.argv[0]` of tasks: the file of the model's function.

    If there is no such file, return the name of the function's module.
    """
    name = config.model.function.rpartition(":")[0]
    if name.endswith(".py"):
        return name
    try:
        return str(find_source(name, config.modules_folder or modules_folder()) or name)
    except ModuleMissingError:  # reported where it is imported
        return name


def find_source(module: str, folder: Path | None = None) -> Path | None:
    """Return the source file of `package.module`, or None if it has none (built in, compiled, without `__init__`).

    Args:
        folder: folder to search before the current directory.

    Raises:
        ModuleMissingError: a part of the name does not exist.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ModuleMissingError(f"{module!r} is not a module name")
    spec = _top(parts[0], folder)
    if spec is None:
        file = Path(*parts).with_suffix(".py")
        hint = (
            f"; there is a file {file}: write './{file}:NAME'"
            if file.is_file()
            else did_you_mean(parts[0], _names_in([os.getcwd()]))
        )
        raise ModuleMissingError(f"no module named '{parts[0]}' in the current folder or Python's path{hint}")
    for depth, part in enumerate(parts[1:], start=1):
        folders = spec.submodule_search_locations
        # by the last part of the name: with the full name, the finder would need the parent, which is not imported
        found = PathFinder.find_spec(part, list(folders)) if folders is not None else None
        if found is None:
            if _may_hold_attributes(spec):
                return None
            parent = ".".join(parts[:depth])
            raise ModuleMissingError(
                f"no module named '{part}' in {parent}{did_you_mean(part, _names_in(list(folders or [])))}"
            )
        spec = found
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


_ALWAYS_LOADED = {*sys.stdlib_module_names, "distlaunch", "keras", "numpy", "tensorflow"}
"""Names that a user's module cannot have: tasks import these before any user code."""


def taken_name(module: str) -> str:
    """Return a user's file in the current directory with the name of a module that is always loaded; else empty."""
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [os.getcwd()]) if top in _ALWAYS_LOADED else None
    if spec is None or not spec.origin or spec.origin == _library(top):
        return ""
    return os.path.relpath(spec.origin)


def _library(name: str) -> str | None:
    """Return the file of a module outside the current directory, or None."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.getcwd()]
    spec = PathFinder.find_spec(name, elsewhere)
    return None if spec is None else spec.origin


def _top(name: str, folder: Path | None) -> ModuleSpec | None:
    # in the same order as in tasks
    if folder is not None and name not in _ALWAYS_LOADED:
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is not None and spec.origin is not None:
            return spec
    spec = PathFinder.find_spec(name, [os.getcwd()]) if not taken_name(name) else None
    if spec is not None and spec.origin is not None:
        return spec
    for finder in sys.meta_path:  # finds built-in modules and editable installs too; imports nothing
        found = finder.find_spec(name, None)
        if found is not None:
            return found
    return spec


def _may_hold_attributes(spec: ModuleSpec) -> bool:
    """Return whether `module.part` may still be a module, like `os.path`, although `os` is not a package."""
    return spec.submodule_search_locations is None


def _names_in(folders: list[str]) -> list[str]:
    """Return the names of modules and packages in some folders."""
    names: list[str] = []
    for folder in folders:
        try:
            entries = list(Path(folder).iterdir())
        except OSError:
            continue
        names += [
            entry.stem for entry in entries if entry.suffix == ".py" or (entry.is_dir() and entry.name.isidentifier())
        ]
    return sorted(set(names) - {"__init__", "__pycache__"})
