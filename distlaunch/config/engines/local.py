"""`engine: {kind: auto}` and `engine: {kind: local}`: the tasks run where the command was started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.config.base import OneLine, Words
from distlaunch.config.engines.base import EngineSection, Local, RemoteSection
from distlaunch.config.engines.slurm import Slurm, is_in_allocation


class Auto(RemoteSection):
    """The hosts that the environment determines.

    If TF_CONFIG is set, the command runs one task of the cluster that TF_CONFIG describes. Otherwise, in a Slurm
    allocation, the tasks run on its nodes, as with `kind: slurm`; the keys of that kind apply, except those that only
    `submit` uses. Otherwise, they run on this machine.
    """

    kind: Literal["auto"] = "auto"

    implementation: ClassVar[str] = Local.implementation
    is_here: ClassVar[bool] = True
    joins_given_cluster: ClassVar[bool] = True

    srun: Annotated[list[OneLine], Words("a list of options, such as ['--exclusive']")] = Field(default_factory=list)
    """In an allocation of Slurm: more options of the `srun` that starts an agent on each node, such as those of a
    container."""

    def resolve(self, environ: Mapping[str, str]) -> EngineSection:
        # options of srun, such as those of a container, also apply to a single node
        if "SLURM_JOB_ID" in environ and (self.srun or is_in_allocation(environ)):
            shared = {name: getattr(self, name) for name in Auto.model_fields if name != "kind"}
            return Slurm(kind="slurm", **shared)
        return Local(kind="local", warm_start=self.warm_start)
