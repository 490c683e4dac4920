"""Where the processes of a run are started. A table, to be extended by a file and a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.config.run import RunConfig
from distlaunch.engines.local import LocalEngine
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.signals import SignalPipe


class Place(Protocol):
    """What an engine found or reserved for one attempt."""

    @property
    def cluster(self) -> ClusterSpec: ...
    @property
    def here(self) -> Task | None: ...
    @property
    def gpus(self) -> Sequence[str]: ...
    def release(self) -> None:
        """Gives back what the tasks have taken over, or do not need any more."""


class Engine(Protocol):
    """Finds a place for a run's tasks, and executes the plan made for it."""

    def find(self, config: RunConfig, environ: Mapping[str, str], *, dry: bool = False) -> Place:
        """Addresses and devices for the tasks. `dry`: reserve nothing; raises UsageError if there are none."""
        ...

    def execute(self, plan: LaunchPlan, place: Place, observer: Observer, signals: SignalPipe | None) -> Outcome:
        """Runs the plan to its end. `signals`: where they are read, if the caller has taken them over."""
        ...


ENGINES: dict[str, Engine] = {"local": LocalEngine()}
