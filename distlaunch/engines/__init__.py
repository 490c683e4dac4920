"""Engines provide hosts for tasks. Each has a section class in `config/engines/`, or in an installed package."""

from __future__ import annotations

import pkgutil

from distlaunch.base.errors import UsageError
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines import installed
from distlaunch.config.engines.base import EngineSection
from distlaunch.engines.base import Engine, HostFiles, Queue


def make_engine(settings: EngineSection, machine: Machine, files: HostFiles) -> Engine:
    """Return the engine of a section.

    Args:
        settings: the section of the engine, as returned by `EngineSection.resolve`.
        machine: this machine, with the variables that the tasks inherit.

    Raises:
        ConfigError: the settings of the engine are wrong.
        UsageError: it cannot be used here.
    """
    return pkgutil.resolve_name(settings.implementation)(settings, machine, files)


def kinds_with_queue() -> list[str]:
    """Return the names of the engines that `distlaunch submit` can use."""
    return [kind for kind, model in installed().models.items() if model.queue]


def make_queue(kind: str) -> Queue:
    """Return the queue of an engine. Raise UsageError if the engine has none, or is not installed."""
    if kind not in kinds_with_queue():
        raise UsageError(f"the engine {kind} has no queue; engines with a queue: {', '.join(kinds_with_queue())}")
    return pkgutil.resolve_name(installed().models[kind].queue)()
