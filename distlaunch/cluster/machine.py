"""The environment and devices of this machine at the start of a command."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from distlaunch.cluster.gpus import find_gpus
from distlaunch.cluster.hardware import Hardware, read_hardware
from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.cluster.tf_config import from_tf_config


@dataclass(frozen=True)
class Machine:
    """The environment and the devices of this machine. Each is determined once.

    Attributes:
        environ: environment variables of the command.
    """

    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> Machine:
        """Return this machine with the environment that this process has now."""
        return cls(dict(os.environ))

    def with_variables(self, variables: Mapping[str, str]) -> Machine:
        """Return this machine with added or changed environment variables."""
        return Machine({**self.environ, **variables}) if variables else self

    def without_variables(self, names: Collection[str]) -> Machine:
        """Return this machine without some environment variables."""
        return Machine({name: value for name, value in self.environ.items() if name not in names})

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """The visible GPUs; see `find_gpus`."""
        return find_gpus(self.environ)

    @cached_property
    def hardware(self) -> Hardware:
        """The hardware of this machine; see `read_hardware`."""
        return read_hardware(self.environ, self.gpus)

    @cached_property
    def tf_config(self) -> tuple[ClusterSpec, Task] | None:
        """The cluster of TF_CONFIG and this process's task; None if the variable is not set.

        Raises:
            UsageError: TF_CONFIG is malformed.
        """
        text = self.environ.get("TF_CONFIG")
        return from_tf_config(text) if text else None
