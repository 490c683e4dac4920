"""Tests of the facts that the launcher finds in the files of its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.agent.messages import Order
from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.liveness import read_liveness
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_error import write_exception
from distlaunch.cluster.spec import Task
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.facts import (
    ErrorReported,
    ErrorRole,
    Exited,
    Fact,
    GivenUp,
    Ready,
    Rules,
    Saving,
    Sent,
    Spawned,
)
from distlaunch.supervise.probes import Probes
from distlaunch.supervise.state import RunState

CHIEF, WORKER, EVALUATOR = "chief:0", "worker:0", "evaluator:0"
UP: list[Fact] = [*(Spawned(0, task) for task in (CHIEF, WORKER)), *(Ready(1, task) for task in (CHIEF, WORKER))]
KILLED = [Sent(9, Order.KILL, (WORKER,)), Exited(9, WORKER, -9)]
AGAIN = [*KILLED, Spawned(9, WORKER), Ready(10, WORKER)]
FAILED = Exited(20, WORKER, 3)
GIVEN_UP = [Spawned(0, EVALUATOR), Exited(5, EVALUATOR, 1), GivenUp(5, EVALUATOR)]


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    run = RunDir(tmp_path)
    tasks = [
        TaskPlan(Task.parse(name), (), {}, run.task(0, name), serves=name == WORKER)
        for name in (CHIEF, WORKER, EVALUATOR)
    ]
    return LaunchPlan(tmp_path, 0, "train", tuple(tasks), 100, 10, chief=Task("chief", 0))


def _probes(plan: LaunchPlan) -> Probes:
    files = {str(task.task): task.files for task in plan.tasks}
    return Probes(plan, Rules.of(plan), 0, lambda name: read_liveness(files[name].heartbeat), lambda addresses: set())


@pytest.mark.parametrize(
    ("history", "found"),
    [
        ([*UP, FAILED], [ErrorReported(20, WORKER, ErrorRole.CAUSE)]),
        ([*UP, *AGAIN, FAILED], [ErrorReported(20, WORKER, ErrorRole.CAUSE)]),
        ([*UP, *GIVEN_UP, FAILED], [ErrorReported(20, WORKER, ErrorRole.CAUSE)]),
        ([*UP, FAILED, ErrorReported(20, WORKER, ErrorRole.CAUSE)], []),
        ([*UP, FAILED, Sent(20, Order.STOP)], []),
    ],
    ids=["first", "after it was killed and started again", "after another was given up", "known", "being stopped"],
)
def test_the_error_of_a_task_that_has_failed(plan: LaunchPlan, history: list[Fact], found: list[Fact]) -> None:
    write_exception(plan.tasks[1].files, ValueError("no"), step=4)
    assert _probes(plan).poll(20, RunState.of(history)) == found


@pytest.mark.parametrize("history", [UP, [*UP, *AGAIN], [*UP, *GIVEN_UP]], ids=["up", "again", "given up"])
def test_errors_are_not_looked_for_while_all_goes_well(plan: LaunchPlan, history: list[Fact]) -> None:
    write_exception(plan.tasks[1].files, ValueError("no"), step=4)
    assert _probes(plan).poll(20, RunState.of(history)) == []


@pytest.mark.parametrize("how", ["saving", "writing"])
def test_who_saves_is_told_once_another_has_ended(plan: LaunchPlan, how: str) -> None:
    probes, heartbeat = _probes(plan), Heartbeat(plan.tasks[0].files.heartbeat)
    failed = [*UP, Exited(20, WORKER, -9)]
    with getattr(heartbeat, how)():
        assert probes.poll(20, RunState.of(UP)) == []
        assert probes.poll(20, RunState.of(failed)) == [Saving(20, CHIEF)]
        assert probes.poll(21, RunState.of([*failed, Saving(20, CHIEF)])) == []
    assert probes.poll(22, RunState.of([*failed, Saving(20, CHIEF)])) == [Saving(22, CHIEF, over=True)]
