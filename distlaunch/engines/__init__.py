"""Engines provide hosts for tasks. An engine is a file or folder here, and a line in `config/engine.py: ENGINES`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping

from distlaunch.cluster.machine import Machine
from distlaunch.config.engine import ENGINES
from distlaunch.config.engine import Engine as EngineSection
from distlaunch.engines.base import Engine, HostFiles, Queue


def _slurm_queue() -> Queue:
    from distlaunch.engines.slurm.queue import SlurmQueue

    return SlurmQueue()


QUEUES: dict[str, Callable[[], Queue]] = {"slurm": _slurm_queue}
"""Engines to which `distlaunch submit` hands jobs that wait for their hosts."""


def make_engine(settings: EngineSection, machine: Machine, files: HostFiles) -> Engine:
    """Return the engine that the section names; `auto`: Slurm within an allocation, else this machine.

    Args:
        machine: with the variables that the tasks inherit.

    Raises:
        ConfigError: the settings of the engine are wrong.
    """
    kind = "slurm" if is_slurm(settings, machine.environ) else settings.kind
    # imported only now: what an engine needs costs the others nothing
    make = pkgutil.resolve_name(f"distlaunch.engines.{ENGINES['local' if kind == 'auto' else kind].factory}")
    return make(settings, machine, files)


def is_slurm(settings: EngineSection, environ: Mapping[str, str]) -> bool:
    """Whether the tasks run on the nodes of a Slurm allocation, if no cluster is given."""
    if settings.kind != "auto" or "SLURM_JOB_ID" not in environ:
        return settings.kind == "slurm"
    from distlaunch.engines.slurm.allocation import is_in_allocation

    # options of srun, such as a container's, are for one node as well
    return bool(settings.slurm.srun) or is_in_allocation(environ)
