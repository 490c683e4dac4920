"""Tasks as processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from distlaunch.agent.host import HostTasks
from distlaunch.agent.messages import TaskSpec
from distlaunch.agent.open_files import FILES_PER_TASK, allow_open_files
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import count
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.ports import ReservedPorts, listening_ports, pick_ports, reserve_ports
from distlaunch.cluster.proxies import direct_paths
from distlaunch.cluster.spec import ClusterSpec, Place, Task, split_address
from distlaunch.config.engines.base import EngineSection
from distlaunch.engines.base import HostFiles, HostReport, Needs
from distlaunch.plan.train import REMOVED_ENV, LaunchPlan, TaskPlan
from distlaunch.supervise.allocation import Starter, TaskHandle

PICKED_LATER = "(picked at start)"
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class LocalAllocation:
    """The allocation on this machine: its GPUs, and the ports reserved for the tasks.

    Attributes:
        environ: the environment variables that tasks inherit.
        warm_starts: processes that have imported a framework, from which tasks are forked.
        adapt: the engine's hook that changes how a task is started.
    """

    environ: Mapping[str, str]
    warm_starts: WarmStarts
    places: tuple[Place, ...] = (Place(),)
    given: tuple[ClusterSpec, Task] | None = None
    adapt: Callable[[TaskSpec], TaskSpec] = lambda spec: spec
    reserved: ReservedPorts = field(default_factory=lambda: ReservedPorts((), ()))
    engine: str = "local"
    notes: Sequence[str] = ()
    has_comparable_heartbeats: bool = True

    @contextmanager
    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> Generator[Starter]:
        with HostTasks(show, clock, self.warm_starts) as tasks:
            yield _Starter(tasks, self.spec_of)

    def listening(self, addresses: Collection[str]) -> set[str]:
        ports = listening_ports()
        return {address for address in addresses if split_address(address)[1] in ports}

    def note_host_failure(self, host: str) -> None:
        """Do nothing, since there is no other host."""

    def import_ahead(self, plan: LaunchPlan) -> None:
        for task in plan.tasks:
            self.warm_starts.process_for(self.spec_of(task))

    def spec_of(self, task: TaskPlan) -> TaskSpec:
        """Return the command, environment and files of a task on this host."""
        inherited = {name: value for name, value in self.environ.items() if name not in REMOVED_ENV}
        env = {**inherited, **task.env}
        env |= direct_paths(env)
        files = task.files
        logs = files.stdout_log, files.stderr_log
        return self.adapt(TaskSpec(str(task.task), task.argv, env, *logs, files.heartbeat, task.preload, task.cores))

    def release_ports(self) -> None:
        self.reserved.release()

    def release(self) -> None:
        self.reserved.release()


class _Starter:
    def __init__(self, tasks: HostTasks, spec_of: Callable[[TaskPlan], TaskSpec]) -> None:
        self._tasks, self._spec_of = tasks, spec_of
        self.watch, self.wait = tasks.watch, tasks.wait

    def start(self, task: TaskPlan) -> TaskHandle:
        return self._tasks.start(self._spec_of(task))

    def send_file(self, path: Path) -> None:
        """Do nothing, since tasks read the files of this host."""

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """Do nothing, since tasks write their files on this host."""


class LocalEngine:
    """Starts the tasks as children of this process.

    Args:
        machine: this machine, with the variables that the tasks inherit.
    """

    hosts = ()
    uses_this_machine_only = True
    name = "local"
    """The name of the engine in plans."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._warm_starts = WarmStarts()
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(self._warm_starts.kept())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def adapt(self, spec: TaskSpec) -> TaskSpec:
        """Return the specification with which to start a task.

        Engines that start tasks on this machine in another way override this method.

        If the `argv` is not that of a Python module of distlaunch, the task gets a new process instead of being forked
        from one that has imported the framework.
        """
        return spec

    def examine(self) -> list[HostReport]:
        from distlaunch.agent.host_state import host_state
        from distlaunch.agent.remote.host_facts import host_facts
        from distlaunch.engines.host_warnings import host_warnings

        facts, state = host_facts(self._machine.environ), host_state(())
        return [HostReport.of(facts["host"], "", facts, state, list(host_warnings(facts["host"], state, {})))]

    def count_slots(self, *, dry: bool = False) -> int:
        return max(1, len(self._machine.gpus))

    def allocate(self, needs: Needs, *, dry: bool = False) -> LocalAllocation:
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
            # raise the limit before reserving ports, since each port is an open file
            allow_open_files(FILES_PER_TASK * needs.num_tasks, count(needs.num_tasks, "task"))
            if number:
                reserved = pick_ports(number) if ports == "auto" else reserve_ports(ports[:number])
            numbers = reserved.numbers
        here = Place(gpus=self._machine.gpus, hardware=self._machine.hardware)
        places = [replace(here, address=f"{_HOST}:{port}") for port in numbers]
        # tasks to which no other task connects need no address
        places += [here] * (needs.num_tasks - number)
        return LocalAllocation(
            self._machine.environ, self._warm_starts, tuple(places), adapt=self.adapt, reserved=reserved,
            engine=self.name,
        )  # fmt: skip


class GivenClusterEngine(LocalEngine):
    """Starts one task of a cluster that TF_CONFIG describes. Other launchers start the other tasks.

    Args:
        machine: this machine, with the variables that the task inherits.
        given: the cluster and its task to start.
    """

    uses_this_machine_only = False
    name = "tf_config"

    def __init__(self, machine: Machine, given: tuple[ClusterSpec, Task]) -> None:
        super().__init__(machine)
        self._given = given

    def allocate(self, needs: Needs, *, dry: bool = False) -> LocalAllocation:
        # the places need no addresses, since TF_CONFIG has them
        places = (Place(gpus=self._machine.gpus, hardware=self._machine.hardware),)
        return LocalAllocation(
            self._machine.environ, self._warm_starts, places, given=self._given, adapt=self.adapt,
            engine=self.name,
        )  # fmt: skip


def local_engine(settings: EngineSection, machine: Machine, files: HostFiles) -> LocalEngine:
    """Return the engine of this machine."""
    return LocalEngine(machine)
