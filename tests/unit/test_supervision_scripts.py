"""Histories of somebody's scripts, which tell no more than that they run and how they end."""

from __future__ import annotations

import signal
import sys

import pytest

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import (
    Absent,
    ErrorReported,
    ErrorRole,
    Exited,
    Fact,
    GivenUp,
    Ready,
    Rules,
    Sent,
    Signal,
    Spawned,
)
from distlaunch.supervise.facts import Training as Up
from distlaunch.supervise.policy import FAILURE_STOP_S, SETTLE_S, Decision, decide
from distlaunch.supervise.state import EXIT_AFTER_ERROR_S, Cause, RunState
from distlaunch.supervise.verdict import Verdict, conclude

A, B, CHIEF, PS, EVALUATOR = "worker:0", "worker:1", "chief:0", "ps:0", "evaluator:0"
WORKERS = Rules(A, False, 100, 30, scripts=True)
SERVERS = Rules(CHIEF, False, 100, 30, frozenset({A, PS}), frozenset({A}), scripts=True)
BESIDE = Rules(A, False, 100, 30, replaceable=frozenset({EVALUATOR}), optional=frozenset({EVALUATOR}), scripts=True)
STOP, KILL, DUMP = Order
CONFIG, CAUSE, CONSEQUENCE = ErrorRole
TERM, DONE = signal.SIGTERM, ExitCode.DONE


def up(*tasks: str) -> list[Fact]:
    return [*(Spawned(0, task) for task in tasks), *(Ready(1, task) for task in tasks), Up(1)]


TWO, SERVED, EVALUATED = up(A, B), up(CHIEF, A, PS), up(A, EVALUATOR)

DECISIONS = {
    "one is done early": (WORKERS, [*TWO, Exited(10, A, 0)], 9999, Decision(Cause.NOTHING)),
    "the last is done": (WORKERS, [*TWO, Exited(10, A, 0), Exited(99, B, 0)], 99, Decision(Cause.NOTHING, over=True)),
    "one fails": (WORKERS, [*TWO, Exited(10, B, 1)], 10.8, Decision(Cause.FAILURE, send=STOP)),
    "one is preempted": (WORKERS, [*TWO, Exited(10, B, 42)], 10.8, Decision(Cause.STOPPED, send=STOP)),
    "asked to stop": (WORKERS, [*TWO, Signal(10, TERM), Sent(10, STOP)], 11, Decision(Cause.TERMINATE, wake_at=40)),
    "asked before they are up": (
        WORKERS,
        [*TWO[:2], Signal(10, TERM), Sent(10, STOP)],
        16,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "one ends by SIGTERM, the other takes its time": (
        WORKERS,
        [*TWO, Signal(10, TERM), Sent(10, STOP), Exited(10.1, B, -TERM)],
        20,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "one has not opened its port": (WORKERS, [*TWO, Absent(100, B)], 100, Decision(Cause.OVERDUE, send=DUMP)),
    "the chief is done": (SERVERS, [*SERVED, Exited(10, CHIEF, 0)], 10, Decision(Cause.LINGERING, send=STOP)),
    "servers that do not end": (
        SERVERS,
        [*SERVED, Exited(10, CHIEF, 0), Sent(10, STOP)],
        10 + FAILURE_STOP_S,
        Decision(Cause.LINGERING, send=KILL),
    ),
    "a worker is killed": (
        SERVERS,
        [*SERVED, Exited(10, A, -signal.SIGKILL)],
        10,
        Decision(Cause.NOTHING, respawn=(A,)),
    ),
    "a worker crashes": (SERVERS, [*SERVED, Exited(10, A, -11)], 10, Decision(Cause.FAILURE, wake_at=10 + SETTLE_S)),
    "a worker ends by itself": (SERVERS, [*SERVED, Exited(10, A, 0)], 10, Decision(Cause.NOTHING)),
    "a server dies": (
        SERVERS,
        [*SERVED, Exited(10, PS, -9)],
        10,
        Decision(Cause.FAILURE, wake_at=10 + SETTLE_S),
    ),
    "one has raised": (
        WORKERS,
        [*TWO, ErrorReported(10, B, CAUSE)],
        11,
        Decision(Cause.NOTHING, wake_at=10 + EXIT_AFTER_ERROR_S),
    ),
    "one has raised, and does not end": (
        WORKERS,
        [*TWO, ErrorReported(10, B, CAUSE)],
        10 + EXIT_AFTER_ERROR_S + SETTLE_S,
        Decision(Cause.FAILURE, send=STOP),
    ),
    "a server has noticed that the chief is gone": (
        SERVERS,
        [*SERVED, ErrorReported(10, A, CONSEQUENCE)],
        50,
        Decision(Cause.NOTHING),
    ),
    "the evaluator fails": (
        BESIDE,
        [*EVALUATED, Exited(10, EVALUATOR, 1)],
        10,
        Decision(Cause.NOTHING, give_up=(EVALUATOR,)),
    ),
    "the evaluator is killed": (
        BESIDE,
        [*EVALUATED, Exited(10, EVALUATOR, -signal.SIGKILL)],
        10,
        Decision(Cause.NOTHING, respawn=(EVALUATOR,)),
    ),
    "the evaluator is done": (BESIDE, [*EVALUATED, Exited(10, EVALUATOR, 0)], 10, Decision(Cause.NOTHING)),
    "the evaluator takes its time": (
        BESIDE,
        [*EVALUATED, Exited(10, A, 0)],
        50,
        Decision(Cause.NOTHING, awaits=(EVALUATOR,), wake_at=110),
    ),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_decide(case: str) -> None:
    rules, history, now, expected = DECISIONS[case]
    assert decide(RunState.of(history), now, rules) == expected


def test_many_servers_are_decided_on_at_once() -> None:
    """The launcher asks several times a second; while it decides, nobody reads the output of the tasks."""
    servers = [f"worker:{index}" for index in range(500)] + [f"ps:{index}" for index in range(500)]
    rules = Rules(CHIEF, False, 100, 30, frozenset(servers), scripts=True)
    history = [*up(CHIEF, *servers), Exited(5, CHIEF, 0)]
    state, calls = RunState.of(history), []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        decision = decide(state, 5, rules)
    finally:
        sys.setprofile(None)
    assert len(calls) < 50 * len(servers)  # and not by each with each
    assert (decision.why, decision.send, decision.to) == (Cause.LINGERING, STOP, ())


ASKED = [Signal(10, TERM), Sent(10, STOP)]
VERDICTS: dict[str, tuple[Rules, list[Fact], Verdict]] = {
    "ended by SIGTERM": (
        WORKERS,
        [*TWO, *ASKED, Exited(10.1, A, -TERM), Exited(10.1, B, 143)],
        Verdict("stopped", ExitCode.PREEMPTED, Cause.TERMINATE),
    ),
    "one done, one ended": (
        WORKERS,
        [*TWO, *ASKED, Exited(10.1, A, 0), Exited(10.1, B, -TERM)],
        Verdict("stopped", ExitCode.PREEMPTED, Cause.TERMINATE),
    ),
    "done in spite of SIGTERM": (
        WORKERS,
        [*TWO, *ASKED, Exited(12, A, 0), Exited(12, B, 0)],
        Verdict("done", DONE, Cause.NOTHING),
    ),
    "the chief done in spite of SIGTERM": (
        SERVERS,
        [*SERVED, Signal(10, TERM), Sent(10, STOP, (CHIEF,)), Exited(12, CHIEF, 0), Sent(12, STOP, (A, PS)),
         Exited(12, A, -TERM), Exited(12, PS, -TERM)],
        Verdict("done", DONE, Cause.NOTHING),
    ),
    "SIGTERM of somebody else": (
        WORKERS,
        [*TWO, Exited(10, B, -TERM), Exited(10.1, A, 0)],
        Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit=B),
    ),
    "who left": (
        WORKERS,
        [*TWO, Exited(9, B, 0), ErrorReported(10, A, CONSEQUENCE), Exited(10, A, 1)],
        Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit=A, left=(B,)),
    ),
    "nobody left": (
        WORKERS,
        [*TWO, Exited(9, B, 0), ErrorReported(10, A, CAUSE), Exited(10, A, 1)],
        Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit=A),
    ),
    "absent": (
        WORKERS,
        [*TWO, Absent(100, B), Sent(100, DUMP), Sent(100.5, STOP), Exited(100.6, A, -TERM),
         Exited(100.6, B, -TERM)],
        Verdict("failed", ExitCode.FAILED, Cause.OVERDUE, silent=(B,)),
    ),
    "one had raised, and hung at its exit": (
        WORKERS,
        [*TWO, ErrorReported(10, B, CAUSE), Sent(15.7, STOP), Exited(15.8, A, -TERM), Sent(20.7, KILL),
         Exited(20.8, B, -signal.SIGKILL)],
        Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit=B),
    ),
    "one had raised, and was ended at its exit": (
        WORKERS,
        [*TWO, ErrorReported(10, B, CAUSE), Sent(15.7, STOP), Exited(15.8, A, -TERM), Exited(15.8, B, -TERM)],
        Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit=B),
    ),
    "an evaluator that was given up": (
        BESIDE,
        [*EVALUATED, Exited(5, EVALUATOR, 1), GivenUp(5, EVALUATOR), Exited(10, A, 0)],
        Verdict("done", DONE, Cause.NOTHING),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_conclude(case: str) -> None:
    rules, history, expected = VERDICTS[case]
    assert conclude(history, 1000, rules) == expected
