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
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Event
from distlaunch.base.run_dir import RunDir
from distlaunch.base.signs import Signs
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.plan.train import LaunchPlan, TaskPlan

HOST = "here"


@dataclass
class Script:
    """What a task does, by seconds after its start.

    Attributes:
        tells: events that it writes to the run.
        ends: when, and with which code; None: not by itself.
        on_stop, on_kill: the code with which it ends when it is asked to; None: it ignores that.
        stop_takes_s: how long it takes to stop.
        beats_until: when its signs of life cease.
        works_until: when it makes no more steps.
        suspended: whether a task without signs of life is suspended, or held by native code.
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

    def asks_to_end(self) -> bool:
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
        if script.ends is not None:
            self._end_at(self._began + script.ends[0], script.ends[1])

    def poll(self) -> Exit | None:
        return self._exit

    def send(self, order: Order, *, whole_group: bool) -> None:
        self.orders.append(order)
        if order is Order.STOP and self._script.on_stop is not None:
            self._end_at(self._clock.now + self._script.stop_takes_s, self._script.on_stop)
        elif order is Order.KILL and self._script.on_kill is not None:
            self._end_at(self._clock.now, self._script.on_kill)

    def is_suspended(self) -> bool:
        return self._script.suspended and self._clock.now - self._began >= self._script.beats_until

    def signs(self) -> Signs:
        passed = min(self._clock.now - self._began, self._script.beats_until)
        worked = int(min(passed, self._script.works_until) * 4)
        return Signs(beats=1 + int(passed * 4), turns=1 + worked, step=worked)

    def _end_at(self, when: float, code: int) -> None:
        def end() -> None:
            self._exit = self._exit or Exit(code, oom=False)

        self._clock.at(when, end)


@dataclass
class MemoryAllocation:
    """Tasks by name; each start takes the next script of the task, the last again and again."""

    run: RunDir
    clock: Clock
    scripts: dict[str, list[Script]]
    signals: Signals
    tasks: dict[str, list[MemoryTask]] = field(default_factory=dict)
    places: Sequence[Place] = ()
    given: tuple[ClusterSpec, Task] | None = None
    engine: str = "memory"
    notes: Sequence[str] = ()
    sees_tasks_at_once: bool = True
    ports_released_at: float | None = None
    blamed: list[str] = field(default_factory=list)

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
    """A plan of tasks that exist nowhere."""
    run = RunDir(folder)
    tasks = tuple(
        TaskPlan(Task.parse(name), ("program",), {}, run.task(0, name), serves=name in serves) for name in names
    )
    chief = Task.parse(names[0])
    return LaunchPlan(folder, 0, "train", tasks, 100, 30, stall_timeout_s, chief=chief)
