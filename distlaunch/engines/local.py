"""Tasks as processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from distlaunch.agent.host import HostTasks
from distlaunch.agent.messages import TaskSpec
from distlaunch.agent.numa import NumaShares
from distlaunch.agent.open_files import FILES_PER_TASK, allow_open_files
from distlaunch.agent.threads import pool_sizes
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import count
from distlaunch.cluster.devices import find_gpus
from distlaunch.cluster.ports import ReservedPorts, listening_ports, pick_ports, reserve_ports
from distlaunch.cluster.proxies import direct_paths
from distlaunch.cluster.spec import ClusterSpec, Place, Task, split_address
from distlaunch.config.engine import Engine as EngineSection
from distlaunch.engines.base import HostFiles, HostReport, Needs
from distlaunch.plan.train import REMOVED_ENV, LaunchPlan, TaskPlan
from distlaunch.supervise.allocation import Starter, TaskHandle

PICKED_LATER = "(picked at start)"
_HOST = "127.0.0.1"
WARM_STARTS = WarmStarts()
"""Of this machine: one for all attempts of a command."""


@dataclass(frozen=True)
class LocalAllocation:
    """This machine: its GPUs, and the ports held for the tasks.

    Attributes:
        environ: what the tasks inherit.
        num_computing: how many tasks share the cores.
    """

    environ: Mapping[str, str]
    places: tuple[Place, ...] = (Place(),)
    given: tuple[ClusterSpec, Task] | None = None
    reserved: ReservedPorts = field(default_factory=lambda: ReservedPorts((), ()))
    num_computing: int = 1
    engine: str = "local"
    notes: Sequence[str] = ()
    sees_tasks_at_once: bool = True

    @contextmanager
    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> Iterator[Starter]:
        with HostTasks(show, clock, WARM_STARTS) as tasks:
            yield _Starter(tasks, self.spec_of, NumaShares(self.num_computing))

    def listening(self, addresses: Collection[str]) -> set[str]:
        ports = listening_ports()
        return {address for address in addresses if split_address(address)[1] in ports}

    def note_host_failure(self, host: str) -> None:
        """There is no other."""

    def import_ahead(self, plan: LaunchPlan) -> None:
        for task in plan.tasks:
            WARM_STARTS.process_for(self.spec_of(task))

    def spec_of(self, task: TaskPlan) -> TaskSpec:
        """What this host must know to start a task."""
        inherited = {name: value for name, value in self.environ.items() if name not in REMOVED_ENV}
        # the user's own OMP_NUM_THREADS and the like win
        env = {**pool_sizes(self.num_computing), **inherited, **task.env}
        env |= direct_paths(env)
        files = task.files
        logs = files.stdout_log, files.stderr_log
        return TaskSpec(str(task.task), task.argv, env, *logs, files.heartbeat, task.preload)

    def release_ports(self) -> None:
        self.reserved.release()

    def release(self) -> None:
        self.reserved.release()


class _Starter:
    def __init__(self, tasks: HostTasks, spec_of: Callable[[TaskPlan], TaskSpec], cores: NumaShares) -> None:
        self._tasks, self._spec_of, self._cores = tasks, spec_of, cores
        self.watch, self.wait = tasks.watch, tasks.wait

    def start(self, task: TaskPlan) -> TaskHandle:
        spec = self._spec_of(task)
        return self._tasks.start(spec._replace(cores=self._cores.of(spec.name, spec.env)))

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """They wrote it here."""


class LocalEngine:
    """Starts the tasks as children of this process."""

    hosts = ()

    def kept(self) -> AbstractContextManager[Any]:
        return WARM_STARTS.kept()

    def examine(self, environ: Mapping[str, str]) -> list[HostReport]:
        from distlaunch.agent.host_state import host_state
        from distlaunch.agent.remote.host_facts import host_facts
        from distlaunch.engines.host_warnings import host_warnings

        facts, state = host_facts(environ), host_state(())
        return [HostReport.of(facts["host"], "", facts, state, list(host_warnings(facts["host"], state, {})))]

    def count_slots(self, environ: Mapping[str, str], *, dry: bool = False) -> int:
        return max(1, len(find_gpus(environ)))

    def allocate(self, needs: Needs, environ: Mapping[str, str], *, dry: bool = False) -> LocalAllocation:
        number, ports = needs.num_addresses, needs.ports
        if ports != "auto" and len(ports) < number:
            message = (
                f"got {count(len(ports), 'port')} for {number} tasks on this machine; give one for each, or `auto`"
            )
            raise ConfigError(Problem(("cluster", "ports"), message))
        reserved = ReservedPorts((), ())
        if dry:
            numbers: Sequence[int | str] = [PICKED_LATER] * number if ports == "auto" else ports[:number]
        else:
            # before ports are held, each of which is an open file
            allow_open_files(FILES_PER_TASK * needs.num_tasks, count(needs.num_tasks, "task"))
            if number:
                reserved = pick_ports(number) if ports == "auto" else reserve_ports(ports[:number])
            numbers = reserved.numbers
        gpus = find_gpus(environ)
        places = [Place("", f"{_HOST}:{port}", gpus) for port in numbers]
        # tasks that nobody connects to need no address
        places += [Place(gpus=gpus)] * (needs.num_tasks - number)
        return LocalAllocation(environ, tuple(places), reserved=reserved, num_computing=needs.num_computing)


LOCAL = LocalEngine()


def local_engine(settings: EngineSection, environ: Mapping[str, str], files: HostFiles) -> LocalEngine:
    """This machine, of which there is one."""
    return LOCAL
