"""Reads the config of a run, which may have been moved since it was started."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.read.load import LoadedConfig, load_config, load_resolved
from distlaunch.config.read.overrides import split
from distlaunch.config.read.scalars import escape
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.references.moved import find_moved
from distlaunch.config.run import RunConfig


@dataclass(frozen=True)
class LoadedRun:
    """The config of a run, adapted to the run's current place.

    Attributes:
        loaded: the config with the sources of its values; None if there are no overrides.
        note: a message about the place of the run's code; empty if the run was not moved.
        warnings: messages about paths in the config's arguments.
    """

    config: RunConfig
    loaded: LoadedConfig | None
    note: str
    warnings: list[str]


def load_run(run: RunDir, overrides: Sequence[str], machine: Machine) -> LoadedRun:
    """Read the config of a run directory, with overrides and the current places of its code.

    Raises:
        ConfigError: the config is wrong, or code that it names is not found and no override names other code.
    """
    environ = {**run.secrets(), **machine.environ}
    config = load_resolved(run.config, environ)
    moved = find_moved(config, run)
    given = set[tuple[str | int, ...]]()
    for text in overrides:
        with contextlib.suppress(ValueError):
            given.add(split(text)[0])
    if missing := [each for each in moved.problems if not any(each.key[: len(key)] == key for key in given)]:
        raise ConfigError(missing)
    loaded = None
    if overrides:
        # apply them before the user's overrides, which have priority
        changed = (f"{_dotted(key)}={json.dumps(escape(value))}" for key, value in moved.values.items())
        loaded = load_config(run.config, (*changed, *overrides), environ, len(machine.gpus), moved.modules)
        config = loaded.config.in_folder(moved.folder)
    else:
        config = moved.applied_to(config)
    _, launched_in = run.started_from()
    config, warnings = with_argument_paths(config, launched_in)
    return LoadedRun(config, loaded, moved.note, warnings)


def _dotted(key: tuple[str | int, ...]) -> str:
    """Return a key as `--set` reads it, whatever characters its parts have."""
    return "".join(f"[{part}]" if isinstance(part, int) else f'["{part}"]' for part in key)
