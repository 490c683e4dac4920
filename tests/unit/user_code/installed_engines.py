from typing import ClassVar, Literal

from distlaunch.config.engines.base import EngineSection


class Tent(EngineSection):
    kind: Literal["tent"]
    implementation: ClassVar[str] = "tent:make"
    is_here: ClassVar[bool] = True
    poles: int = 2
    """How many poles it has."""


class Unnamed(EngineSection):
    kind: Literal["another"]
    implementation: ClassVar[str] = "tent:make"


class Empty(EngineSection):
    kind: Literal["empty"]


def make(settings, machine, files):
    from distlaunch.engines.local import LocalEngine

    return LocalEngine(machine)
