"""Tasks as processes of this machine; also the one task of a cluster that TF_CONFIG describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distlaunch.agent.open_files import allow_open_files
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.devices import find_gpus
from distlaunch.cluster.ports import HeldPorts, hold_ports, pick_ports
from distlaunch.cluster.spec import ClusterSpec, Task, from_tf_config
from distlaunch.config.run import RunConfig
from distlaunch.plan.train import LaunchPlan, can_join, local_cluster, processes
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.signals import SignalPipe
from distlaunch.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from distlaunch.engines import Place

PICKED_LATER = "(picked at start)"


@dataclass(frozen=True)
class LocalPlace:
    """Addresses on this machine, its GPUs, and the ports held for the tasks."""

    cluster: ClusterSpec
    here: Task | None = None
    gpus: tuple[str, ...] = ()
    held: HeldPorts = field(default_factory=lambda: HeldPorts((), ()))

    def release(self) -> None:
        self.held.release()


def given_cluster(config: RunConfig, environ: Mapping[str, str]) -> tuple[ClusterSpec, Task] | None:
    """The cluster that the environment says this process belongs to; None for strategies of a single process."""
    text = environ.get("TF_CONFIG")
    return from_tf_config(text) if text and can_join(config) else None


class LocalEngine:
    """Starts the tasks as children of this process."""

    def find(self, config: RunConfig, environ: Mapping[str, str], *, dry: bool = False) -> LocalPlace:
        gpus = find_gpus(environ)
        given = given_cluster(config, environ)
        if given is not None:
            return LocalPlace(*given, gpus=gpus)
        count, ports = sum(processes(config).values()), config.cluster.ports
        if not count:
            return LocalPlace(ClusterSpec({}), gpus=gpus)
        if not dry:
            allow_open_files(count + config.cluster.evaluator)
        if ports == "auto":
            if dry:
                return LocalPlace(local_cluster(config, [PICKED_LATER] * count), gpus=gpus)
            held = pick_ports(count)
            return LocalPlace(local_cluster(config, held.numbers), gpus=gpus, held=held)
        if len(ports) < count:
            message = f"got {len(ports)} port(s) for {count} tasks on this machine; give one for each, or `auto`"
            raise ConfigError(Problem(("cluster", "ports"), message))
        if dry:
            return LocalPlace(local_cluster(config, ports), gpus=gpus)
        return LocalPlace(local_cluster(config, ports), gpus=gpus, held=hold_ports(ports[:count]))

    def execute(self, plan: LaunchPlan, place: Place, observer: Observer, signals: SignalPipe | None) -> Outcome:
        # a server that is started again gets its port back, so it must stay ours while the attempt lasts
        keeps_ports = any(task.serves for task in plan.tasks)
        release = _keep if keeps_ports else place.release
        try:
            return Supervisor(plan, observer, on_training=release, signals=signals).run()
        finally:
            place.release()


def _keep() -> None:
    """Releases nothing."""
