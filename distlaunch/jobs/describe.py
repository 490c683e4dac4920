"""Describes the variables and data of a plan in a helper process, since the launcher never imports TensorFlow."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.events import VariablesPlaced
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.cluster.gpus import VISIBLE
from distlaunch.cluster.machine import Machine
from distlaunch.config.run import RunConfig
from distlaunch.jobs.choose_run import Locate
from distlaunch.plan.train import REMOVED_ENV

_WITHOUT = {"variables": "; `--no-variables` leaves them out", "data": "; leave `--data` out to see the rest"}
_LIMIT_S = 600.0  # includes the user's data function


def describe_variables(config: RunConfig, locate: Locate, machine: Machine) -> VariablesPlaced | None:
    """Return where the variables of the config's model are placed, or None if every task holds all of them.

    Raises:
        ConfigError: the model cannot be built because of the config.
        UsageError: building it failed for another reason.
    """
    if not config.strategy.places_variables:
        return None
    answer = _run_description(
        "variables", config, locate, machine, "the model could not be built, so its variables cannot be shown"
    )
    return VariablesPlaced(variables=answer["variables"], mesh=answer["mesh"])


def describe_data(config: RunConfig, locate: Locate, machine: Machine) -> dict[str, Any]:
    """Return which task reads which data; see `data/overview.py`.

    Raises:
        ConfigError: the data does not fit the config.
        UsageError: reading it failed for another reason.
    """
    return _run_description("data", config, locate, machine, "the data could not be read")


def _run_description(what: str, config: RunConfig, locate: Locate, machine: Machine, failure: str) -> dict[str, Any]:
    from distlaunch.config.read.load import dump_config

    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        gpus = str(len(machine.gpus))
        argv = [sys.executable, *SAFE_MODULE, "distlaunch.tasks.describe", what, str(path), gpus, ANSWER]
        kept = {name: value for name, value in machine.environ.items() if name not in REMOVED_ENV}
        try:
            answer = run_helper(argv, {**kept, **config.task_environ(), VISIBLE: "-1"}, timeout_s=_LIMIT_S)
        except TimeoutError:
            raise UsageError(f"{failure} within {_LIMIT_S:g} s{_WITHOUT[what]}") from None
    if answer.value is None:
        last = answer.output[-1].strip() if answer.output else "no reason given"
        raise UsageError(f"{failure}: {last}{_WITHOUT[what]}")
    if "problems" in answer.value:
        found = [Problem(tuple(item["key"]), str(item["message"])) for item in answer.value["problems"]]
        raise ConfigError(locate(found))
    return answer.value
