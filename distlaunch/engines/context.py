"""The launch context of a command, resolved once from its config, its environment and this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.config.engines.base import EngineSection
from distlaunch.config.given_cluster import joined_cluster
from distlaunch.config.references.sites import data_paths, named_files
from distlaunch.config.run import RunConfig
from distlaunch.engines import make_engine
from distlaunch.engines.base import Engine, HostFiles
from distlaunch.engines.local import GivenClusterEngine


@dataclass(frozen=True)
class LaunchContext:
    """The settings and devices with which a command starts tasks. Later code does not read the environment.

    Attributes:
        machine: this machine, with the environment variables that the tasks inherit.
        settings: the section of the engine to use, which is never `auto`.
        files: the files that the tasks read on every host.
        given: the cluster that TF_CONFIG describes, and the one task of it that this command starts. None if the
            command starts all tasks of a new cluster.
    """

    machine: Machine
    settings: EngineSection
    files: HostFiles
    given: tuple[ClusterSpec, Task] | None = None

    @classmethod
    def resolve(cls, config: RunConfig, machine: Machine) -> LaunchContext:
        """Return the context of a command that has this config.

        Raises:
            UsageError: TF_CONFIG is malformed.
        """
        files = HostFiles(named_files(config), data_paths(config))
        with_secrets = machine.with_variables(config.task_environ())
        settings = config.engine.resolve(machine.environ)
        return cls(with_secrets, settings, files, joined_cluster(config, machine))

    @cached_property
    def engine(self) -> Engine:
        """Return the engine, a context manager; a command starts everything within its context.

        Raises:
            ConfigError: its settings are wrong.
            UsageError: it cannot be used here.
        """
        if self.given is not None:
            return GivenClusterEngine(self.machine, self.given)
        return make_engine(self.settings, self.machine, self.files)

    @property
    def is_secondary_srun_task(self) -> bool:
        """Return True if `srun` has started this command several times and another copy does the work."""
        return self.given is None and self.settings.is_secondary_task(self.machine.environ)


SECONDARY_SRUN_TASK = (
    "srun has started this command several times: task 0 of the step does the work, so this task exits"
)
