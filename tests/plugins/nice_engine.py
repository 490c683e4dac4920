"""An engine in a package of its own: the tasks run on this machine with a lower priority.

The example of an engine that distlaunch does not know. test_installed_engines.py installs it; its entry point is

    [project.entry-points."distlaunch.engines"]
    nice = "nice_engine:Nice"
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.agent.messages import TaskSpec
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.base import EngineSection
from distlaunch.engines.base import HostFiles, Needs
from distlaunch.engines.local import LocalAllocation, LocalEngine
from distlaunch.plan.train import TaskPlan


class Nice(EngineSection):
    """This machine, for jobs that must not slow others down."""

    kind: Literal["nice"]

    implementation: ClassVar[str] = "nice_engine:make_engine"
    is_here: ClassVar[bool] = True

    level: Annotated[int, Field(ge=1, le=19)] = 10
    """How much the tasks' priority is lowered."""


@dataclasses.dataclass(frozen=True)
class NiceAllocation(LocalAllocation):
    """The local allocation, with another command for each task."""

    level: int = 10

    def spec_of(self, task: TaskPlan) -> TaskSpec:
        spec = super().spec_of(task)
        return spec._replace(argv=("nice", "-n", str(self.level), *spec.argv))


class NiceEngine(LocalEngine):
    def __init__(self, section: Nice, machine: Machine) -> None:
        super().__init__(machine)
        self._section = section

    def allocate(self, needs: Needs, *, dry: bool = False) -> NiceAllocation:
        local = super().allocate(needs, dry=dry)
        fields = {each.name: getattr(local, each.name) for each in dataclasses.fields(local)}
        return NiceAllocation(**{**fields, "engine": self._section.kind}, level=self._section.level)


def make_engine(settings: Nice, machine: Machine, files: HostFiles) -> NiceEngine:
    return NiceEngine(settings, machine)
