"""An engine in a package of its own: the tasks run on this machine with a lower priority.

The example of an engine that distlaunch does not know. test_installed_engines.py installs it; its entry point is

    [project.entry-points."distlaunch.engines"]
    nice = "nice_engine:Nice"
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.agent.messages import TaskSpec
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.base import EngineSection
from distlaunch.engines.base import HostFiles
from distlaunch.engines.local import LocalEngine


class Nice(EngineSection):
    """This machine, for jobs that must not slow others down."""

    kind: Literal["nice"]

    implementation: ClassVar[str] = "nice_engine:make_engine"
    is_here: ClassVar[bool] = True

    level: Annotated[int, Field(ge=1, le=19)] = 10
    """How much the tasks' priority is lowered."""


class NiceEngine(LocalEngine):
    """The local engine, with another command for each task. The tasks are not forked from a warm process."""

    name = "nice"

    def __init__(self, section: Nice, machine: Machine) -> None:
        super().__init__(machine)
        self._level = section.level

    def adapt(self, spec: TaskSpec) -> TaskSpec:
        return spec._replace(argv=("nice", "-n", str(self._level), *spec.argv))


def make_engine(settings: Nice, machine: Machine, files: HostFiles) -> NiceEngine:
    return NiceEngine(settings, machine)
