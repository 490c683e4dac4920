"""Checks of a config that depend on this machine: free ports, a place for the run directory, installed packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlaunch.base.errors import Problem
from distlaunch.cluster.ports import OTHER_PORTS, port_problem
from distlaunch.config.references.keras_names import missing_package
from distlaunch.config.run import Callback, RunConfig, TrackerName


def machine_problems(config: RunConfig) -> list[Problem]:
    """Return problems that would keep a run of this config from starting here."""
    return [
        *busy_ports(config),
        *runs_dir_problems(config),
        *config.engine.machine_problems(),
        *missing_packages(config.train.callbacks),
    ]


def missing_packages(callbacks: Sequence[Callback]) -> Iterator[Problem]:
    """Yield problems for packages that callbacks would fail to import during training."""
    for index, callback in enumerate(callbacks):
        if missing := missing_package(callback.name):
            yield Problem(("train", "callbacks", index, "name"), missing)


def missing_trackers(names: Sequence[TrackerName]) -> Iterator[Problem]:
    """Yield problems for trackers whose packages are not installed."""
    for index, name in enumerate(names):
        if importlib.util.find_spec(name) is None:
            yield Problem(("tracking", index), f"{name} is not installed: pip install 'distlaunch[{name}]'")


def busy_ports(config: RunConfig) -> Iterator[Problem]:
    """Yield problems for fixed ports that another process holds."""
    if config.cluster.ports == "auto" or not config.engine.is_here:
        return
    for index, port in enumerate(config.cluster.ports):
        if reason := port_problem(port):
            yield Problem(("cluster", "ports", index), f"{reason}; {OTHER_PORTS}")


def runs_dir_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the run directory, or its parents, can be created."""
    folder = Path(config.runs_dir).absolute()
    # `lexists`: a broken link is an obstacle too
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        message = f"got {config.runs_dir!r}, but {existing} is a file; expected a folder; choose another one"
        yield Problem(("runs_dir",), message)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(("runs_dir",), f"got {config.runs_dir!r}, but {existing} is not writable; choose another folder")
