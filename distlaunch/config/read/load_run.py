"""Reads the config of a run, which may have been moved since it was started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.read.load import LoadedConfig, load_config, load_stored
from distlaunch.config.read.overrides import key_of
from distlaunch.config.read.scalars import escape
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.references.moved import find_moved, shown_path
from distlaunch.config.run import RunConfig


@dataclass(frozen=True)
class LoadedRun:
    """The config of a run, adapted to the run's current place.

    Attributes:
        loaded: the config of the run with overrides, and the sources of its values.
        note: a message about the place of the run's code; empty if the run was not moved.
        warnings: messages about paths in the config's arguments.
    """

    config: RunConfig
    loaded: LoadedConfig
    note: str
    warnings: list[str]


def load_run(run: RunDir, overrides: Sequence[str], machine: Machine, file: Path | None = None) -> LoadedRun:
    """Read the config of a run directory, with overrides and the current places of its code.

    Args:
        file: the config of one of its attempts; None for the newest config.

    Raises:
        ConfigError: the config is wrong, or code that it names is not found and no override names other code.
    """
    environ = {**run.secrets(), **machine.environ}
    path = Path(shown_path(file or run.config))
    loaded = load_stored(path, environ)
    moved = find_moved(loaded.config, run)
    given = {key for key in map(key_of, overrides) if key}
    if missing := [each for each in moved.problems if not any(each.key[: len(key)] == key for key in given)]:
        raise ConfigError(missing)
    if overrides:
        # apply them before the user's overrides, which have priority
        changed = (f"{_dotted(key)}={json.dumps(escape(value))}" for key, value in moved.values.items())
        loaded = load_config(path, (*changed, *overrides), environ, len(machine.gpus), moved.modules)
        config = loaded.config.in_folder(moved.folder)
    else:
        config = moved.applied_to(loaded.config)
    _, launched_in = run.started_from()
    config, warnings = with_argument_paths(config, launched_in)
    return LoadedRun(config, loaded, moved.note, warnings)


def _dotted(key: tuple[str | int, ...]) -> str:
    """Return a key as `--set` reads it, whatever characters its parts have."""
    return "".join(f"[{part}]" if isinstance(part, int) else f'["{part}"]' for part in key)
