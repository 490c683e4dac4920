"""Asks a process that has TensorFlow where a model's variables would go; the launcher never loads it itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.events import VariablesPlaced
from distlaunch.cluster.devices import VISIBLE
from distlaunch.config.run import RunConfig
from distlaunch.jobs.job import Locate
from distlaunch.plan.train import REMOVED_ENV

_LIMIT_S = 600.0


def describe_variables(config: RunConfig, locate: Locate) -> VariablesPlaced | None:
    """Where the variables of the config's model would go; None if every task holds all.

    Raises:
        ConfigError: the model cannot be built, with the lines that say why.
        UsageError: building it failed otherwise.
    """
    from distlaunch.config.read.load import dump_config

    if not config.strategy.places_variables:
        return None
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        argv = [sys.executable, "-m", "distlaunch.tasks.describe", str(path)]
        kept = {name: value for name, value in os.environ.items() if name not in REMOVED_ENV}
        environ = {**kept, VISIBLE: "-1"}
        try:
            done = subprocess.run(
                argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            message = f"the model was not built within {_LIMIT_S:g} s; `--no-variables` leaves its variables out"
            raise UsageError(message) from None
    return _read(done, locate)


def _read(done: subprocess.CompletedProcess[str], locate: Locate) -> VariablesPlaced:
    try:
        told = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise UsageError(
            f"the model could not be built, so its variables cannot be shown: {last.strip()}; "
            "`--no-variables` leaves them out"
        ) from None
    if "problems" in told:
        raise ConfigError(locate(Problem.from_plain(item) for item in told["problems"]))
    return VariablesPlaced(variables=told["variables"], mesh=told["mesh"])
