"""Engines provide hosts for tasks. An engine is a file or folder here, and a line in `config/engine.py: ENGINES`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping

from distlaunch.config.engine import ENGINES
from distlaunch.config.engine import Engine as EngineSection
from distlaunch.config.references.data_paths import data_paths
from distlaunch.config.references.sites import named_files
from distlaunch.config.run import RunConfig
from distlaunch.config.tf_config import tf_config_cluster
from distlaunch.engines.base import Engine, HostFiles, Queue
from distlaunch.engines.given_cluster import GivenClusterEngine

LEFT_TO_ANOTHER = "srun has started this command several times: task 0 of the step does the work, and this one ends"


def _slurm_queue() -> Queue:
    from distlaunch.engines.slurm.queue import SlurmQueue

    return SlurmQueue()


QUEUES: dict[str, Callable[[], Queue]] = {"slurm": _slurm_queue}
"""Engines to which `distlaunch submit` hands jobs that wait for their hosts."""


def engine_of(config: RunConfig, environ: Mapping[str, str]) -> Engine:
    """The engine that the config names; `auto`: the cluster that TF_CONFIG describes, else Slurm, else this machine.

    Raises ConfigError if its settings are wrong.
    """
    given = tf_config_cluster(config, environ)
    if given is not None:
        return GivenClusterEngine(given)
    return engine_for(config.engine, environ, HostFiles(named_files(config), data_paths(config)))


def engine_for(settings: EngineSection, environ: Mapping[str, str], files: HostFiles) -> Engine:
    """The same for what takes no part in a given cluster."""
    kind = "slurm" if is_slurm(settings, environ) else settings.kind
    # imported only now: what an engine needs costs the others nothing
    make = pkgutil.resolve_name(f"distlaunch.engines.{ENGINES['local' if kind == 'auto' else kind].factory}")
    return make(settings, environ, files)


def is_slurm(settings: EngineSection, environ: Mapping[str, str]) -> bool:
    """Whether the tasks run on the nodes of a Slurm allocation, if no cluster is given."""
    if settings.kind != "auto" or "SLURM_JOB_ID" not in environ:
        return settings.kind == "slurm"
    from distlaunch.engines.slurm.allocation import is_in_allocation

    # options of srun, such as a container's, are for one node as well
    return bool(settings.slurm.srun) or is_in_allocation(environ)


def is_left_to_another(settings: EngineSection, environ: Mapping[str, str]) -> bool:
    """Whether `srun` has started the same command several times, and another of them does the work."""
    if not is_slurm(settings, environ):
        return False
    from distlaunch.engines.slurm.allocation import is_one_of_many

    return is_one_of_many(environ)
