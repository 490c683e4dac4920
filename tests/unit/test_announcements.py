"""Tests of the announcement that tasks are still running after another one has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.announcements import Announcer
from distlaunch.supervise.facts import Exited, Fact, Rules, Signal, Spawned
from distlaunch.supervise.state import RunState

A, B, C = "worker:0", "worker:1", "worker:2"
SCRIPTS: dict[str, Any] = {"scripts": True}
TOLD = "worker:1 ended with exit code 0 more than 30 s ago; worker:0, worker:2 still run, and `distlaunch logs runs/job"


@pytest.mark.parametrize(
    ("facts", "rules", "now", "told"),
    [
        ([Exited(10, B, 0)], SCRIPTS, 39, ""),
        ([Exited(10, B, 0)], SCRIPTS, 41, TOLD),
        ([Exited(10, B, 1)], SCRIPTS, 41, ""),
        ([Exited(10, B, 0), Exited(35, A, 0)], SCRIPTS, 41, "; worker:2 still runs, and"),
        ([Exited(10, B, 0), Exited(10, A, 0), Exited(20, C, 0)], SCRIPTS, 41, ""),
        ([Exited(10, B, 0), Signal(20, 15)], SCRIPTS, 41, ""),
        ([Exited(10, B, 0)], {}, 41, ""),
        ([Exited(10, B, 0)], {"scripts": True, "servers": frozenset({C})}, 41, ""),
        ([Exited(10, B, 0)], {"scripts": True, "optional": frozenset({B})}, 41, ""),
    ],
)
def test_scripts_that_go_on_after_another_has_ended_well(
    facts: list[Fact], rules: dict[str, Any], now: float, told: str
) -> None:
    said: list[str] = []
    plan = cast("LaunchPlan", SimpleNamespace(run_dir="runs/job"))
    announcer = Announcer(plan, Rules(A, False, 100, 30, **rules), [A, B, C], said.append)
    state = RunState.of([Spawned(0, A), Spawned(0, B), Spawned(0, C), *facts])
    for at in (now, now + 100):
        announcer.waiting((), state, at if told else now)
    assert len(said) == bool(told)
    assert told in "".join(said)
