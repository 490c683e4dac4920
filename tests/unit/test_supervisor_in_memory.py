"""The whole supervisor, over an engine without processes: whole jobs of minutes, in no time."""

from __future__ import annotations

import io
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, RunEnded, TaskFailed, TaskStarted, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_error import write_exception
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.supervise.diagnose import diagnosis
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.supervisor import Supervisor
from distlaunch.ui.progress.state import ProgressState
from distlaunch.ui.report import print_failure
from tests.unit.memory_engine import Clock, MemoryAllocation, Script, Signals, plan_of

CHIEF, OTHER, PS = "worker:0", "worker:1", "ps:0"
UP = (1.0, TaskStarted(host="here", pid=1))
TRAINS = (
    2.0,
    TrainingStarted(
        strategy="s", loop="fit", replicas=2, tasks=2, global_batch=8, epochs=1, first_epoch=0, first_step=0,
        steps_per_epoch=4, parameters=0,
    ),
)  # fmt: skip


def done(at: float, status: str = "done") -> tuple[float, Event]:
    return at, RunEnded(status=status, step=4, epochs_done=1, seconds=at)


@dataclass
class Case:
    """A job of several tasks, and how it must end.

    Attributes:
        ends_at: bounds of the time at which the controller is done.
        restarts: how often each task was started again.
    """

    scripts: dict[str, list[Script]]
    status: str
    culprit: str = ""
    reason: str = ""
    signals: tuple[tuple[float, signal.Signals], ...] = ()
    ends_at: tuple[float, float] = (0, 1_000)
    restarts: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


CHIEF_DONE = Script([UP, TRAINS, done(600)], ends=(601, 0))
PEER_DONE = Script([UP], ends=(601, 0))
SERVERS: dict[str, Any] = {"serves": (OTHER, PS)}
CASES = {
    "all end": Case({CHIEF: [CHIEF_DONE], OTHER: [PEER_DONE]}, "done", ends_at=(601, 602)),
    "a worker is killed": Case(
        {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP], ends=(50, -9))]},
        "failed", OTHER, "killed by SIGKILL", ends_at=(50, 52),
    ),
    "a worker ends too early": Case(
        {CHIEF: [Script([UP, TRAINS])], OTHER: [Script([UP], ends=(50, 0))]},
        "failed", OTHER, "ended with exit code 0 before training was done",
    ),
    "a worker never comes": Case(
        {CHIEF: [Script([UP])], OTHER: [Script()]}, "failed", OTHER, "did not come up within 100 s", ends_at=(100, 103)
    ),
    "a worker freezes": Case(
        {CHIEF: [Script([UP, TRAINS])], OTHER: [Script([UP], beats_until=40, on_stop=None)]},
        "failed", OTHER, "sent no heartbeat (its process is suspended, as by SIGSTOP) for 60 s", ends_at=(100, 107),
    ),
    "SIGTERM": Case(
        {CHIEF: [Script([UP, TRAINS], stop_takes_s=9)], OTHER: [Script([UP], stop_takes_s=9)]},
        "stopped", signals=((50, signal.SIGTERM),), ends_at=(59, 60),
    ),
    "SIGTERM is ignored": Case(
        {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP])]},
        "failed", CHIEF, "did not stop within 30 s", signals=((50, signal.SIGTERM),), ends_at=(80, 82),
    ),
    "Ctrl-C twice": Case(
        {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP], on_stop=None)]},
        "interrupted", signals=((50, signal.SIGINT), (52, signal.SIGINT)), ends_at=(52, 53),
    ),
    "not even SIGKILL ends it": Case(
        {CHIEF: [Script([UP, TRAINS], on_stop=None, on_kill=None)], OTHER: [Script([UP], ends=(50, -9))]},
        "failed", OTHER, "killed by SIGKILL", ends_at=(60, 63),
    ),
    "a program that is not there": Case(
        {CHIEF: [Script([UP])], OTHER: [Script(cannot_start=True)]},
        "failed", OTHER, "could not be started: No such file or directory (program)", ends_at=(0, 10),
    ),
    "a server is started again": Case(
        {
            "chief:0": [CHIEF_DONE],
            OTHER: [Script([UP], ends=(50, -9)), Script([UP], on_stop=0)],
            PS: [Script([UP], on_stop=0)],
        },
        "done", restarts={OTHER: 1}, plan=SERVERS,
    ),
    "a server that never comes up is given up": Case(
        {"chief:0": [Script([UP, TRAINS])], OTHER: [Script(ends=(3, 1))], PS: [Script([UP], on_stop=0)]},
        "failed", OTHER, "ended 3 times in a row before it was up", restarts={OTHER: 2}, plan=SERVERS,
    ),
    "a parameter server is lost": Case(
        {
            "chief:0": [Script([UP, TRAINS])],
            OTHER: [Script([UP], on_stop=0)],
            PS: [Script([UP], ends=(50, -9))],
        },
        "failed", PS, "killed by SIGKILL", plan=SERVERS,
    ),
}  # fmt: skip


def supervise(folder: Path, case: Case) -> tuple[Outcome, MemoryAllocation]:
    clock, run = Clock(), RunDir(folder)
    allocation = MemoryAllocation(run, clock, case.scripts, Signals(clock, *case.signals))
    plan = plan_of(folder, *case.scripts, **case.plan)
    supervisor = Supervisor(plan, allocation, Silent(), clock=clock, signals=allocation.signals)  # type: ignore[arg-type]
    return supervisor.run(), allocation


@pytest.mark.parametrize("name", CASES)
def test_how_a_job_ends(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    outcome, allocation = supervise(tmp_path, case)
    failure = outcome.failure
    assert (outcome.status, failure.task if failure else "") == (case.status, case.culprit)
    assert case.reason in (failure.reason if failure else "")
    low, high = case.ends_at
    assert low <= allocation.clock.now <= high
    assert {task: len(starts) - 1 for task, starts in allocation.tasks.items() if len(starts) > 1} == case.restarts
    ends = [event for event in read_events(RunDir(tmp_path).events) if isinstance(event, RunEnded)]
    assert ends[-1].status == case.status


@pytest.mark.parametrize(
    "part",
    [
        "read_error",
        "last_lines",
        "config_problems",
        "find_failure",
        "is_retryable",
        "failure_mark",
        "is_lost",
        "is_outside_job",
    ],
)
def test_a_diagnosis_that_fails_costs_neither_the_exit_code_nor_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("not enough values\nto unpack")

    monkeypatch.setattr(diagnosis, part, broken)
    case = CASES["a worker is killed"]
    outcome, _ = supervise(tmp_path, case)
    # without the file of the task's error, nothing is proven
    code = ExitCode.FAILED if part in ("read_error", "is_outside_job") else ExitCode.TEMPORARY
    assert (outcome.status, outcome.exit_code) == ("failed", code)
    console = Console(file=io.StringIO(), width=200)
    print_failure(console, ProgressState(), AttemptResult(plan_of(tmp_path, *case.scripts), outcome))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"failed: {OTHER} on " in said
    assert "killed by" in said
    assert str(tmp_path / "attempts/0/worker-1/stderr.log") in said.replace("\n", "")
    assert "a bug in distlaunch; please report it: ValueError: not enough values" in said
    assert "(test_supervisor_in_memory.py:" in said
    ends = [event for event in read_events(RunDir(tmp_path).events) if isinstance(event, RunEnded | TaskFailed)]
    assert [type(event) for event in ends] == [TaskFailed, RunEnded]


def test_the_host_of_the_task_that_does_not_answer_has_failed(tmp_path: Path) -> None:
    """Not the host of the task that noticed it."""
    clock, run = Clock(), RunDir(tmp_path)
    scripts = {
        CHIEF: [Script([UP, TRAINS], on_stop=None, beats_until=20)],
        OTHER: [Script([UP], ends=(30.0, 3))],
    }
    error = type("DeadlineExceededError", (Exception,), {})("no heartbeat")
    clock.at(29.0, lambda: write_exception(run.task(0, OTHER), error))
    plan = plan_of(tmp_path, *scripts)
    tasks = tuple(replace(task, host=f"host of {task.task}") for task in plan.tasks)
    allocation = MemoryAllocation(run, clock, scripts, Signals(clock))
    supervisor = Supervisor(
        replace(plan, tasks=tasks),
        allocation,
        Silent(),
        clock=clock,
        signals=allocation.signals,  # type: ignore[arg-type]
    )
    outcome = supervisor.run()
    assert outcome.failure is not None
    assert outcome.failure.task == CHIEF
    assert "stopped answering (its process is suspended" in outcome.failure.reason
    assert allocation.blamed == [f"host of {CHIEF}"]


def test_a_failed_job_has_trained_since_its_first_step(tmp_path: Path) -> None:
    supervise(tmp_path, CASES["a worker is killed"])  # which trains from second 2 on, and is killed in second 50
    [end] = [event for event in read_events(RunDir(tmp_path).events) if isinstance(event, RunEnded)]
    assert 48 <= end.seconds < 50


def test_ports_are_given_back_once_they_are_bound(tmp_path: Path) -> None:
    assert supervise(tmp_path / "a", CASES["all end"])[1].ports_released_at == pytest.approx(2, abs=0.2)
    assert supervise(tmp_path / "b", CASES["a server is started again"])[1].ports_released_at is None


def test_a_task_that_is_just_being_started_again_is_not_asked_for_stacks(tmp_path: Path) -> None:
    """The signal ends a process that does not handle it yet."""
    late = (20.0, UP[1])
    scripts = {
        "chief:0": [CHIEF_DONE],
        OTHER: [Script([UP], ends=(50, -9)), Script([late], on_stop=0)],
        PS: [Script([UP], on_stop=0)],
    }
    case = Case(scripts, "done", plan=SERVERS, signals=((60, signal.SIGUSR2), (90, signal.SIGUSR2)))
    outcome, allocation = supervise(tmp_path, case)
    assert outcome.status == "done"
    assert [task.orders.count(Order.DUMP) for task in allocation.tasks[OTHER]] == [0, 1]
    assert allocation.tasks[PS][0].orders.count(Order.DUMP) == 2


def test_stacks_are_asked_for_and_nobody_is_stopped(tmp_path: Path) -> None:
    case = Case({CHIEF: [CHIEF_DONE], OTHER: [PEER_DONE]}, "done", signals=((50, signal.SIGUSR2),))
    outcome, allocation = supervise(tmp_path, case)
    assert outcome.status == "done"
    assert {name: tasks[0].orders for name, tasks in allocation.tasks.items()} == {
        CHIEF: [Order.DUMP],
        OTHER: [Order.DUMP],
    }
