"""An engine without processes: tasks are scripts of what happens when, and time passes only when somebody waits."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distlaunch.agent.messages import Exit, Order
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Event
from distlaunch.base.liveness import Liveness
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hosts import place_tasks
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.engines.base import HostReport, Needs
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.testing.engines import NUM_LINES, PROGRAMS

HOST = "here"


@dataclass
class Script:
    """Script of what a task does. All times are in seconds after its start.

    Attributes:
        tells: events that the task writes to the run, and when.
        ends: when the task exits by itself, and with which code; None if it does not.
        on_stop, on_kill: exit code of the task after such an order; None if it ignores the order.
        stop_takes_s: seconds from the order to stop until the exit.
        beats_until: when the heartbeats stop.
        works_until: when the task stops making steps.
        does: other actions, and when.
        tells_stop: called when the task is asked to stop.
        suspended: whether a task without heartbeats is suspended; otherwise native code holds it up.
    """

    tells: Sequence[tuple[float, Event]] = ()
    ends: tuple[float, int] | None = None
    on_stop: int | None = 4
    on_kill: int | None = -9
    stop_takes_s: float = 0.0
    beats_until: float = float("inf")
    works_until: float = float("inf")
    suspended: bool = True
    cannot_start: bool = False
    does: Sequence[tuple[float, Callable[[], None]]] = ()
    tells_stop: Callable[[], None] = lambda: None


class Clock:
    """Seconds that pass when `advance` is called; what is due is done on the way."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), call))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = until


class Signals:
    """Signals to the controller, at their times."""

    fd = -1

    def __init__(self, clock: Clock, *sent: tuple[float, signal.Signals]) -> None:
        self.waiting: list[signal.Signals] = []
        for when, number in sent:
            clock.at(when, lambda number=number: self.waiting.append(number))

    def read(self) -> list[signal.Signals]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def stop_is_requested(self) -> bool:
        return bool(self.waiting)

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None: ...


class MemoryTask:
    """A task that plays its script."""

    host = HOST

    def __init__(self, script: Script, clock: Clock, tell: Callable[[Event], None], pid: int) -> None:
        self._script, self._clock, self.pid = script, clock, pid
        self._began, self.orders = clock.now, list[Order]()
        self._exit: Exit | None = None
        for after, event in script.tells:
            clock.at(self._began + after, lambda event=event: tell(event) if self._exit is None else None)
        for after, action in script.does:
            clock.at(self._began + after, lambda action=action: action() if self._exit is None else None)
        if script.ends is not None:
            self._end_at(self._began + script.ends[0], script.ends[1])

    def poll(self) -> Exit | None:
        return self._exit

    def send(self, order: Order, *, whole_group: bool) -> None:
        self.orders.append(order)
        if order is Order.STOP and self._exit is None:
            self._script.tells_stop()
        if order is Order.STOP and self._script.on_stop is not None:
            self._end_at(self._clock.now + self._script.stop_takes_s, self._script.on_stop)
        elif order is Order.KILL and self._script.on_kill is not None:
            self._end_at(self._clock.now, self._script.on_kill)

    def end(self, code: int) -> None:
        """End it with an exit code."""
        self._exit = self._exit or Exit(code, oom=False)

    def lose(self, why: str) -> None:
        """End it with its host."""
        self._exit = self._exit or Exit(-signal.SIGKILL, oom=None, lost=why)

    def is_suspended(self) -> bool:
        return self._script.suspended and self._clock.now - self._began >= self._script.beats_until

    def liveness(self) -> Liveness:
        passed = min(self._clock.now - self._began, self._script.beats_until)
        worked = int(min(passed, self._script.works_until) * 4)
        return Liveness(beats=1 + int(passed * 4), calls=1 + worked, step=worked)

    def _end_at(self, when: float, code: int) -> None:
        def end() -> None:
            self._exit = self._exit or Exit(code, oom=False)

        self._clock.at(when, end)


@dataclass
class MemoryAllocation:
    """Tasks by name; each start uses the task's next script, and further starts repeat the last one."""

    run: RunDir
    clock: Clock
    scripts: dict[str, list[Script]]
    signals: Signals
    tasks: dict[str, list[MemoryTask]] = field(default_factory=dict)
    places: Sequence[Place] = ()
    given: tuple[ClusterSpec, Task] | None = None
    engine: str = "memory"
    notes: Sequence[str] = ()
    has_comparable_heartbeats: bool = True
    ports_released_at: float | None = None
    blamed: list[str] = field(default_factory=list)
    on_file: list[Callable[[Path], None]] = field(default_factory=list)

    @contextlib.contextmanager
    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> Iterator[MemoryAllocation]:
        yield self

    def start(self, task: TaskPlan) -> MemoryTask:
        name = str(task.task)
        before = self.tasks.setdefault(name, [])
        scripts = self.scripts[name]
        script = scripts[min(len(before), len(scripts) - 1)]
        if script.cannot_start:
            raise FileNotFoundError(2, "No such file or directory")
        made = MemoryTask(script, self.clock, lambda event: self._write(name, event), pid=1000 + len(self.tasks))
        before.append(made)
        return made

    def watch(self, fd: int) -> None: ...

    def send_file(self, path: Path) -> None:
        for action in self.on_file:
            action(path)

    def collect(self, gives_up: Callable[[], bool]) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        self.clock.advance(timeout_s)
        return bool(self.signals.waiting)

    def import_ahead(self, plan: LaunchPlan) -> None: ...

    def listening(self, addresses: Collection[str]) -> set[str]:
        return set()

    def note_host_failure(self, host: str) -> None:
        self.blamed.append(host)

    def release_ports(self) -> None:
        self.ports_released_at = self.clock.now

    def release(self) -> None: ...

    def _write(self, name: str, event: Event) -> None:
        # the first task speaks for the run, the others for themselves
        path = self.run.events if name == next(iter(self.scripts)) else self.run.task(0, name).events
        writer = EventWriter(path, attempt=0, task=name)
        writer.write(event)
        writer.close()


def plan_of(folder: Path, *names: str, serves: Collection[str] = (), stall_timeout_s: float | None = 60) -> LaunchPlan:
    """A plan of tasks that are not real processes."""
    run = RunDir(folder)
    tasks = tuple(
        TaskPlan(Task.parse(name), ("program",), {}, run.task(0, name), serves=name in serves) for name in names
    )
    chief = Task.parse(names[0])
    return LaunchPlan(folder, 0, "train", tasks, 100, 30, stall_timeout_s, chief=chief)


@dataclass
class PlayedAllocation(MemoryAllocation):
    """Hosts in memory, whose tasks play the programs of the conformance suite."""

    lost: set[str] = field(default_factory=set)
    show: Callable[[str, str], None] = lambda task, line: None

    @contextlib.contextmanager
    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> Iterator[MemoryAllocation]:
        self.show = show
        try:
            yield self
        finally:
            for made in self.tasks.values():
                made[-1].send(Order.KILL, whole_group=True)
            self.clock.advance(0.0)

    def start(self, task: TaskPlan) -> MemoryTask:
        name = str(task.task)
        self.scripts[name] = [self._script(task)]
        made = super().start(task)
        made.host = task.host
        return made

    def listening(self, addresses: Collection[str]) -> set[str]:
        return set()

    def lose(self, host: str) -> None:
        """Make a host disappear."""
        self.lost.add(host)
        for made in self.tasks.values():
            if made[-1].host == host:
                made[-1].lose(f"the host {host} has disappeared")

    def _script(self, task: TaskPlan) -> Script:
        (program,) = [name for name, source in PROGRAMS.items() if source == task.argv[-1]]
        out, name = _Output(task, self.show), str(task.task)
        match program:
            case "ends":
                return Script(ends=(1, 3 if name == "worker:1" else 0))
            case "is killed":
                return Script(ends=(1, -signal.SIGKILL))
            case "prints":
                lines = "".join(f"line {number}\n" for number in range(NUM_LINES)) + "the last, without an end"
                return Script(does=[(1, lambda: out.write(lines)), (1, lambda: out.complain("trouble\n"))], ends=(2, 0))
            case "tells":
                names = ("DISTLAUNCH_TASK", "DISTLAUNCH_ATTEMPT", "TF_CONFIG")
                told = "".join(f"{name} {task.env.get(name)}\n" for name in names)
                return Script(does=[(1, lambda: out.write(told))], ends=(2, 0))
            case "reports":
                error = task.files.error_json
                return Script(does=[(1, lambda: error.write_text('{"reason": "as written"}') and None)], ends=(2, 0))
            case "reads":

                def read(path: Path) -> None:
                    if path.read_text() == "second":
                        out.write("read\n")
                        self.tasks[name][-1].end(0)

                self.on_file.append(read)
                return Script(does=[(1, lambda: out.write("up\n"))])
            case "stops":
                return Script(does=[(1, lambda: out.write("up\n"))], on_stop=4, tells_stop=lambda: out.write("asked\n"))
            case "does not stop":
                return Script(does=[(1, lambda: out.write("up\n"))], on_stop=None)
            case _:
                raise AssertionError(program)


class _Output:
    """Output of a task, which is written to its logs and shown line by line."""

    def __init__(self, task: TaskPlan, show: Callable[[str, str], None]) -> None:
        self._task, self._show = task, show
        for log in (task.files.stdout_log, task.files.stderr_log):
            log.touch()

    def write(self, text: str) -> None:
        with self._task.files.stdout_log.open("a") as log:
            log.write(text)
        for line in text.splitlines():
            self._show(str(self._task.task), line)

    def complain(self, text: str) -> None:
        with self._task.files.stderr_log.open("a") as log:
            log.write(text)
        self._show(str(self._task.task), text.rstrip("\n"))


class MemoryEngine:
    """Two hosts in memory, each with room for two workers."""

    hosts = ("here", "there")
    uses_this_machine_only = False
    slots_of_each = 2

    def __init__(self, folder: Path) -> None:
        self._run, self._clock = RunDir(folder / "runs" / "job"), Clock()
        self._lost: set[str] = set()
        self._ports = itertools.count(5000)

    def __enter__(self) -> MemoryEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def examine(self) -> list[HostReport]:
        return [HostReport(name, name, "3.11", {}, 2, 1 << 30, (), "", name, 1 << 30) for name in self._there()]

    def count_slots(self, *, dry: bool = False) -> int:
        return self.slots_of_each * len(self._there())

    def allocate(self, needs: Needs, *, dry: bool = False) -> PlayedAllocation:
        if needs.ports != "auto" and len(needs.ports) < needs.num_addresses:
            message = f"got {len(needs.ports)} port for {needs.num_addresses} tasks; give one for each, or `auto`"
            raise ConfigError(Problem(("cluster", "ports"), message))
        names = self._there()
        numbers = place_tasks(needs.jobs, [self.slots_of_each] * len(names), names)
        hosts = [names[number] for number in [*numbers, *[0] * (needs.num_tasks - len(numbers))]]
        places = [
            Place(host, f"{host}:{next(self._ports)}" if number < needs.num_addresses else "")
            for number, host in enumerate(hosts)
        ]
        return PlayedAllocation(self._run, self._clock, {}, Signals(self._clock), places=places, lost=self._lost)

    def _there(self) -> list[str]:
        return [name for name in self.hosts if name not in self._lost]
