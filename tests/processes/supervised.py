"""Plans of real children, and what is left of them."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.events import Event
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.engines.local import LocalAllocation
from distlaunch.plan.train import LaunchPlan, Mode, TaskPlan
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.supervisor import Supervisor

CHILD = Path(__file__).with_name("child.py")
REPOSITORY = str(Path(__file__).parents[2])


@dataclass
class Recorder:
    """An observer that remembers."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    on_tick: Callable[[], None] = lambda: None

    def started(self, plan: LaunchPlan) -> None: ...

    def event(self, event: Event) -> None:
        self.events.append(event)

    def line(self, task: str, text: str) -> None:
        self.lines.append((task, text))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tick(self, now: float) -> None:
        self.on_tick()

    def ended(self) -> None: ...


def supervise(plan: LaunchPlan, observer: Observer | None = None, environ: Mapping[str, str] = os.environ) -> Outcome:
    """Runs a plan to its end, with real processes of this machine."""
    return Supervisor(plan, LocalAllocation(environ, WarmStarts()), observer or Recorder()).run()


def make_plan(
    run_dir: Path, *tasks: list[str], mode: Mode = "train", start_timeout_s: float = 30, stop_timeout_s: float = 10
) -> LaunchPlan:
    """A plan of tasks that run child.py with these actions."""
    run = RunDir(run_dir)
    plans = []
    for index, actions in enumerate(tasks):
        task = Task("worker", index)
        argv = (sys.executable, str(CHILD), str(run.path), str(task), *actions)
        env = {"PYTHONPATH": REPOSITORY, "MARKER": str(run.path)}
        plans.append(TaskPlan(task, argv, env, run.task(0, str(task)), f"127.0.0.1:{1000 + index}"))
    return LaunchPlan(run.path, 0, mode, tuple(plans), start_timeout_s, stop_timeout_s)


def make_servers_plan(run_dir: Path, start_timeout_s: float = 30, **tasks: list[str]) -> LaunchPlan:
    """A plan of parameter servers, such as `make_servers_plan(path, chief_0=[...], worker_0=[...], ps_0=[...])`."""
    plan = make_plan(run_dir, *tasks.values(), start_timeout_s=start_timeout_s)
    run, plans = RunDir(run_dir), []
    for name, given in zip(tasks, plan.tasks, strict=True):
        job, _, index = name.partition("_")
        task = Task(job, int(index))
        argv = tuple(str(task) if word == str(given.task) else word for word in given.argv)
        env, files = {**given.env, "LEAD": "chief:0"}, run.task(0, str(task))
        plans.append(TaskPlan(task, argv, env, files, serves=job in ("worker", "ps")))
    return dataclasses.replace(plan, tasks=tuple(plans), chief=Task("chief", 0))


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return running processes of a run, which have its mark in the environment or its directory in the command."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("MARKER") == str(run_dir)
            named = any(word.startswith(str(run_dir)) for word in process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and (marked or named):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = 15) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
