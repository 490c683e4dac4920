"""The code of a run that was moved: to another machine, to another folder, or in an artifact that was unpacked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.tree import Key
from distlaunch.config.references.sites import sites
from distlaunch.config.run import RunConfig

_ARGS: tuple[Key, ...] = (("model", "args"), ("data", "args"), ("data", "preprocessing", "args"))


@dataclass
class Moved:
    """Where the files that a run's config names are now.

    Attributes:
        values: values of the config that have changed, by their keys.
        folder: the folder from which the config's relative paths start; None: not known.
        note: what to say about it; empty: nothing was moved.
        problems: files that are not found.
    """

    values: dict[Key, str] = field(default_factory=dict)
    folder: Path | None = None
    note: str = ""
    problems: list[Problem] = field(default_factory=list)

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Return the config with the values of this place."""
        if not self.values:
            return config
        plain: Any = config.to_plain()
        for key, value in self.values.items():
            parent = plain
            for part in key[:-1]:
                parent = parent[part]
            parent[key[-1]] = value
        return RunConfig.model_validate(plain)


def find_moved(config: RunConfig, run: RunDir) -> Moved:
    """Look for the files that a run's config names: where they lie relative to the run, then where they were.

    A file of another user counts only if it lies where it should relative to the run.
    """
    before, (folder, _) = run.recorded_path(), run.started_from()
    found = Moved(folder=folder)
    for site in sites(config):
        file, colon, function = site.name.rpartition(":")
        if not colon or not file.endswith(".py"):
            continue
        path = Path(file)
        here = path if before is None else _moved(path, before, run.path)
        if here.is_file():
            if here != path:
                found.values[site.key] = f"{here}:{function}"
                found.note = f"the run was moved: its code is taken from {_shown(here.parent)}"
        elif not _is_own_file(path):
            found.problems.append(Problem(site.key, _not_found(path, here, site.key, function)))
        elif before != run.path:
            found.note = f"the run was moved without its code, which is taken from {path.parent}"
    if folder is not None and before is not None and before != run.path and (found.values or not folder.is_dir()):
        found.folder = _moved(folder, before, run.path)
        for key in _ARGS:
            _move_texts(_at(config.to_plain(), key), key, folder, found)
    return found


def _moved(path: Path, before: Path, now: Path) -> Path:
    """Return the path that lies relative to the run as this one did."""
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
    elsewhere = f"{path} belongs to another user" if is_there else f"{path}, where it was, is not there either"
    return f"no such file: {_shown(here)}, where it should lie beside the run that was moved; {elsewhere}; {hint}"


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _at(plain: Any, key: Key) -> Any:
    for part in key:
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain


def _move_texts(value: Any, key: Key, folder: Path, found: Moved) -> None:
    """Find the arguments that lead into the config's former folder."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _move_texts(inner, (*key, name), folder, found)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _move_texts(inner, (*key, index), folder, found)
    elif isinstance(value, str) and value.startswith(f"{folder}/") and found.folder is not None:
        found.values[key] = str(found.folder / value.removeprefix(f"{folder}/"))
