"""Finds the code of a run that was moved to another machine or folder, or unpacked from an artifact."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.tree import Key
from distlaunch.config.references.modules import ModuleMissingError, find_source
from distlaunch.config.references.sites import sites
from distlaunch.config.run import RunConfig

_PLACES: tuple[Key, ...] = (
    ("model", "args"), ("data", "args"), ("data", "preprocessing", "args"), ("data", "tfds", "data_dir"),
)  # fmt: skip
"""Keys with paths, as they are or within other values."""


@dataclass
class Moved:
    """Current locations of the files that a run's config names.

    Attributes:
        values: changed values of the config, by their keys.
        folder: the folder from which the config's relative paths start; None if unknown.
        modules: the folder that is searched for modules before the current directory; None if there is none.
        note: a message about the move; empty if nothing was moved.
        problems: files that were not found.
    """

    values: dict[Key, str] = field(default_factory=dict)
    folder: Path | None = None
    modules: Path | None = None
    note: str = ""
    problems: list[Problem] = field(default_factory=list)

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Return the config with the values for this location."""
        if not self.values:
            return config.in_folder(self.folder).with_modules_in(self.modules)
        plain: Any = config.to_plain()
        for key, value in self.values.items():
            parent = plain
            for part in key[:-1]:
                parent = parent[part]
            parent[key[-1]] = value
        return config.changed(plain).in_folder(self.folder).with_modules_in(self.modules)


def find_moved(config: RunConfig, run: RunDir) -> Moved:
    """Find the code that a run's config names: first at its place relative to the run, then at its former place.

    A file of another user is used only at its place relative to the run.
    """
    before, (folder, _) = run.recorded_path(), run.started_from()
    found = Moved(folder=folder)
    _find_modules(config, run, before, found)
    for site in sites(config):
        file, colon, function = site.name.rpartition(":")
        if not colon or not file.endswith(".py"):
            continue
        path = Path(file)
        here = path if before in (None, run.path) else _moved(path, before, run.path)
        if here.is_file():
            if here != path:
                found.values[site.key] = f"{here}:{function}"
                found.note = f"the run was moved: its code is taken from {shown_path(here.parent)}"
        elif not _is_own_file(path):
            found.problems.append(Problem(site.key, _not_found(path, here, site.key, function)))
        elif before not in (None, run.path):
            found.note = f"the run was moved without its code, which is taken from {path.parent}"
    if folder is not None and before is not None and before != run.path and (found.values or not folder.is_dir()):
        found.folder = _moved(folder, before, run.path)
        for key in _PLACES:
            _move_texts(_at(config.to_plain(), key), key, folder, found)
    return found


def is_moved(old: str, new: str, run: RunDir) -> bool:
    """Return whether two values of a config name the same file, at a former and the current place of the run."""
    if not (old.startswith("/") and new.startswith("/")):
        return False
    # if this run is a copy whose `checkpoints` link to the original run, the original's folder also counts as its place
    now = (run.path, run.checkpoints.resolve().parent)
    return any(str(_moved(Path(old), before, place)) == new for before in run.known_paths() for place in now)


def _find_modules(config: RunConfig, run: RunDir, before: Path | None, found: Moved) -> None:
    """Find the folder of the modules that the config names, and modules that do not exist."""
    named = [(site, site.name.rpartition(":")[0]) for site in sites(config) if site.is_reference]
    modules = [(site, module) for site, module in named if not module.endswith(".py")]
    recorded = run.modules_from()
    here = recorded if recorded is None or before is None else _moved(recorded, before, run.path)
    for folder in dict.fromkeys(folder for folder in (here, recorded) if folder is not None):
        files = [file for _, module in modules if (file := _file_in(folder, module)) is not None]
        if not files or (folder != here and not all(map(_is_own_file, files))):
            continue
        found.modules = None if folder == Path.cwd() else folder
        if before not in (None, run.path):
            how = "moved: its code" if folder == here else "moved without its code, which"
            found.note = f"the run was {how} is taken from {shown_path(folder)}"
        break
    for site, module in modules:
        try:
            find_source(module, found.modules)
        except ModuleMissingError as error:
            beside = ""
            if here is not None and here != Path.cwd():
                beside = f"not in {shown_path(here)}, where it should be relative to the run: "
            key = Problem(site.key, "").dotted
            hint = f"put it there, add --set {key}=PATH/FILE.py:{site.name.rpartition(':')[2]}, or set PYTHONPATH"
            found.problems.append(Problem(site.key, f"{beside}{error}; {hint}"))


def _file_in(folder: Path, module: str) -> Path | None:
    """Return the source of a module if it is in this folder, else None."""
    try:
        file = find_source(module, folder)
    except (ModuleMissingError, OSError):
        return None
    return file if file is not None and file.is_relative_to(folder) else None


def _moved(path: Path, before: Path, now: Path) -> Path:
    """Return the path that lies relative to `now` as `path` lies relative to `before`, the run's former place."""
    return Path(os.path.normpath(now / os.path.relpath(path, before)))


def _is_own_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _not_found(path: Path, here: Path, key: Key, function: str) -> str:
    hint = f"put it there, or add --set {Problem(key, '').dotted}=PATH/{path.name}:{function}"
    if path == here:
        return f"no such file: {path}; {hint}"
    is_there = path.is_file()
    elsewhere = f"{path} belongs to another user" if is_there else f"{path}, its former place, does not exist either"
    return f"no such file: {shown_path(here)}, where it should be relative to the moved run; {elsewhere}; {hint}"


def shown_path(path: Path) -> str:
    """Return a path as messages show it: relative to the current directory if it is below that."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _at(plain: Any, key: Key) -> Any:
    for part in key:
        plain = plain.get(part) if is_dict(plain) else None
    return plain


def _move_texts(value: Any, key: Key, folder: Path, found: Moved) -> None:
    """Find the arguments that refer to the config's former folder."""
    if is_dict(value):
        for name, inner in value.items():
            _move_texts(inner, (*key, name), folder, found)
    elif is_list(value):
        for index, inner in enumerate(value):
            _move_texts(inner, (*key, index), folder, found)
    elif isinstance(value, str) and value.startswith(f"{folder}/") and found.folder is not None:
        found.values[key] = str(found.folder / value.removeprefix(f"{folder}/"))
