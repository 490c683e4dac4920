"""Where the tasks of a run are started. An engine is a file or folder here, a config class and a line in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distlaunch.config.references.sites import named_files
from distlaunch.config.run import RunConfig
from distlaunch.config.tf_config import tf_config_cluster
from distlaunch.engines.base import Engine, Queue
from distlaunch.engines.given_cluster import GivenClusterEngine
from distlaunch.engines.local import LocalEngine

LOCAL = LocalEngine()


def _ssh(config: RunConfig, environ: Mapping[str, str]) -> Engine:
    from distlaunch.engines.ssh import ssh_engine  # what it needs costs the other engines nothing

    return ssh_engine(config.engine, named_files(config))


def _slurm(config: RunConfig, environ: Mapping[str, str]) -> Engine:
    from distlaunch.engines.slurm.allocation import slurm_engine

    return slurm_engine(config.engine, environ, named_files(config))


ENGINES: dict[str, Callable[[RunConfig, Mapping[str, str]], Engine]] = {
    "local": lambda config, environ: LOCAL,
    "ssh": _ssh,
    "slurm": _slurm,
}


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
    kind = config.engine.kind
    if kind == "auto":
        kind = "slurm" if is_slurm(config, environ) else "local"
    return ENGINES[kind](config, environ)


def is_slurm(config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Whether the tasks run on the nodes of a Slurm allocation."""
    if config.engine.kind != "auto" or "SLURM_JOB_ID" not in environ:
        return config.engine.kind == "slurm"
    from distlaunch.engines.slurm.allocation import is_in_allocation

    # options of srun, such as a container's, are for one node as well
    return tf_config_cluster(config, environ) is None and (bool(config.engine.slurm.srun) or is_in_allocation(environ))


def is_left_to_another(config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Whether `srun` has started the same command several times, and another of them does the work."""
    if not is_slurm(config, environ):
        return False
    from distlaunch.engines.slurm.allocation import is_one_of_many

    return is_one_of_many(environ)
