"""Asks a process that has TensorFlow where a model's variables would go; the launcher never loads it itself."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.events import VariablesPlaced
from distlaunch.base.helper_process import ANSWER, ask
from distlaunch.cluster.devices import VISIBLE
from distlaunch.config.run import RunConfig
from distlaunch.jobs.job import Locate
from distlaunch.plan.train import REMOVED_ENV

_LIMIT_S = 600.0  # for the user's own functions, the data function among them


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
        argv = [sys.executable, "-m", "distlaunch.tasks.describe", str(path), ANSWER]
        kept = {name: value for name, value in os.environ.items() if name not in REMOVED_ENV}
        try:
            answer = ask(argv, {**kept, VISIBLE: "-1"}, timeout_s=_LIMIT_S)
        except TimeoutError:
            message = f"the model was not built within {_LIMIT_S:g} s; `--no-variables` leaves its variables out"
            raise UsageError(message) from None
    if answer.told is None:
        last = answer.said[-1].strip() if answer.said else "no reason given"
        raise UsageError(
            f"the model could not be built, so its variables cannot be shown: {last}; `--no-variables` leaves them out"
        )
    if "problems" in answer.told:
        found = [Problem(tuple(item["key"]), str(item["message"])) for item in answer.told["problems"]]
        raise ConfigError(locate(found))
    return VariablesPlaced(variables=answer.told["variables"], mesh=answer.told["mesh"])
