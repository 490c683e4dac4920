"""Engines provide hosts for tasks. Each has a section class in `config/engines/`, or in a package of its own."""

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
        settings: of one engine, as `EngineSection.resolve` returns it.
        machine: with the variables that the tasks inherit.

    Raises:
        ConfigError: the settings of the engine are wrong.
        UsageError: it cannot be used here.
    """
    return pkgutil.resolve_name(settings.implementation)(settings, machine, files)


def kinds_with_queue() -> list[str]:
    """Return the engines to which `distlaunch submit` hands jobs that wait for their hosts."""
    return [kind for kind, model in installed().models.items() if model.queue]


def make_queue(kind: str) -> Queue:
    """Return the queue of an engine. Raises UsageError if it has none, or is not installed."""
    if kind not in kinds_with_queue():
        raise UsageError(f"the engine {kind} has no queue; those that have: {', '.join(kinds_with_queue())}")
    return pkgutil.resolve_name(installed().models[kind].queue)()
