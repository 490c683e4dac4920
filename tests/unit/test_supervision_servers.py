"""Decisions and verdicts that follow from the histories of parameter servers and of the evaluator."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import (
    Closed,
    ErrorReported,
    ErrorRole,
    Exited,
    Fact,
    Finished,
    GivenUp,
    Progressed,
    Ready,
    Rules,
    Sent,
    Signal,
    Spawned,
    Stalled,
    Training,
)
from distlaunch.supervise.policy import FAILURE_STOP_S, SETTLE_S, Decision, decide
from distlaunch.supervise.state import Cause, RunState
from distlaunch.supervise.verdict import conclude

CHIEF, W0, W1, PS, EV = "chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"
RULES = Rules(
    chief=CHIEF,
    needs_finish=True,
    start_timeout_s=100,
    stop_timeout_s=30,
    servers=frozenset({W0, W1, PS}),
    replaceable=frozenset({W0, W1, EV}),
    optional=frozenset({EV}),
)
LONE = dataclasses.replace(
    RULES,
    chief=W0,
    needs_finish=False,
    servers=frozenset({W0}),
    replaceable=frozenset({W0}),
    optional=frozenset(),
)
START: list[Fact] = [Spawned(0, task) for task in (CHIEF, W0, W1, PS, EV)]
TRAINING: list[Fact] = [*START, *(Ready(1, task) for task in (CHIEF, W0, W1, PS, EV)), Training(2)]
DONE: list[Fact] = [*TRAINING, Finished(9, CHIEF), Exited(10, CHIEF, 0)]
SERVERS_GONE: list[Fact] = [
    *DONE,
    Sent(10, Order.STOP, (W0, W1, PS)),
    *(Exited(10.1, task, 0) for task in (W0, W1, PS)),
]
ALONE: list[Fact] = [Spawned(0, W0), Ready(1, W0), Training(1)]
STOP, KILL, DUMP = Order
CONFIG, CAUSE, CONSEQUENCE = ErrorRole
INT, TERM = signal.SIGINT, signal.SIGTERM
AGAIN = Decision(Cause.NOTHING, respawn=(W1,))


def deaths(task: str, times: int, code: int = -9, since: float = 10) -> list[Fact]:
    """The task's process ends, is started again, and ends before it has come up."""
    facts: list[Fact] = [Exited(since, task, code)]
    for number in range(1, times + 1):
        facts += [Spawned(since + number, task), Exited(since + number, task, code)]
    return facts


DECISIONS = {
    "a worker is killed": ([*TRAINING, Exited(10, W1, -9)], 10, AGAIN),
    "a worker ends by itself": ([*TRAINING, Exited(10, W1, 0)], 10, AGAIN),
    "a worker ends for preemption": ([*TRAINING, Exited(10, W1, 4)], 10, AGAIN),
    "a worker has lost a peer": (
        [*TRAINING, Exited(10, W1, 3), ErrorReported(10, W1, CONSEQUENCE)],
        10,
        AGAIN,
    ),
    "two at once": (
        [*TRAINING, Exited(10, W0, -9), Exited(10, EV, -9)],
        10,
        Decision(Cause.NOTHING, respawn=(W0, EV)),
    ),
    "a worker is back": ([*TRAINING, Exited(10, W1, -9), Spawned(10, W1)], 11, Decision(Cause.NOTHING)),
    "a worker dies again": ([*TRAINING, Exited(10, W1, -9), Spawned(10, W1), Exited(11, W1, -9)], 11, AGAIN),
    "a worker raises": (
        [*TRAINING, Exited(10, W1, 3), ErrorReported(10, W1, CAUSE)],
        10,
        Decision(Cause.FAILURE, wake_at=10 + SETTLE_S),
    ),
    "a worker finds the config wrong": (
        [*TRAINING, Exited(10, W1, 2), ErrorReported(10, W1, CONFIG)],
        10,
        Decision(Cause.FAILURE, wake_at=10 + SETTLE_S),
    ),
    "the error of a process before it": (
        [
            *TRAINING,
            Exited(10, W1, 3),
            ErrorReported(10, W1, CONSEQUENCE),
            Spawned(10, W1),
            Ready(12, W1),
            Exited(13, W1, -9),
        ],
        13,
        AGAIN,
    ),
    "twice in vain": ([*TRAINING, *deaths(W1, 2)], 12, AGAIN),
    "three times in vain": ([*TRAINING, *deaths(W1, 3)], 13, Decision(Cause.FAILURE, wake_at=13 + SETTLE_S)),
    "three times in vain, all told": (
        [*TRAINING, *deaths(W1, 3), Sent(13.7, STOP)],
        14,
        Decision(Cause.FAILURE, wake_at=13 + SETTLE_S + FAILURE_STOP_S),
    ),
    "a chief that is killed": ([*TRAINING, Exited(10, CHIEF, -9)], 10.8, Decision(Cause.FAILURE, send=STOP)),
    "a ps that is killed": ([*TRAINING, Exited(10, PS, -9)], 10.8, Decision(Cause.FAILURE, send=STOP)),
    "a ps that ends": ([*TRAINING, Exited(10, PS, 0)], 10.8, Decision(Cause.FAILURE, send=STOP)),
    "no restart in a failed attempt": (
        [*TRAINING, Exited(10, PS, -9), Exited(10.1, W1, -9)],
        10.2,
        Decision(Cause.FAILURE, wake_at=10 + SETTLE_S),
    ),
    "no restart while stopping": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP, (CHIEF, EV)), Exited(11, W1, -9)],
        11,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "no restart when the chief is done": (
        [*TRAINING, Finished(9, CHIEF), Exited(9.5, W1, -9), Exited(9.5, EV, -9)],
        9.5,
        Decision(Cause.NOTHING),
    ),
    "no restart when the chief has stopped": (
        [*TRAINING, Closed(9, CHIEF), Exited(9.5, EV, 0)],
        9.5,
        Decision(Cause.NOTHING),
    ),
    "an evaluator is killed": ([*TRAINING, Exited(10, EV, -9)], 10, Decision(Cause.NOTHING, respawn=(EV,))),
    "an evaluator raises": (
        [*TRAINING, Exited(10, EV, 3), ErrorReported(10, EV, CAUSE)],
        10,
        Decision(Cause.NOTHING, give_up=(EV,)),
    ),
    "an evaluator in vain": ([*TRAINING, *deaths(EV, 3)], 13, Decision(Cause.NOTHING, give_up=(EV,))),
    "an evaluator that is given up": (
        [*TRAINING, Exited(10, EV, 3), ErrorReported(10, EV, CAUSE), GivenUp(10, EV)],
        11,
        Decision(Cause.NOTHING),
    ),
    "SIGTERM goes to the chief first": (
        [*TRAINING, Signal(10, TERM)],
        10,
        Decision(Cause.TERMINATE, send=STOP, to=(CHIEF, EV)),
    ),
    "so does Ctrl-C": ([*TRAINING, Signal(10, INT)], 10, Decision(Cause.INTERRUPT, send=STOP, to=(CHIEF, EV))),
    "servers wait for the chief": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP, (CHIEF, EV)), Exited(10.1, EV, 0)],
        15,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "servers end after the chief": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP, (CHIEF, EV)), Exited(10.1, EV, 0), Exited(15, CHIEF, 4)],
        15,
        Decision(Cause.TERMINATE, send=STOP),
    ),
    "servers have a moment of their own": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP, (CHIEF, EV)), Exited(39.9, CHIEF, 4), Sent(39.9, STOP)],
        40,
        Decision(Cause.TERMINATE, send=KILL, to=(EV,)),
    ),
    "a second Ctrl-C ends all": (
        [*TRAINING, Signal(10, INT), Sent(10, STOP, (CHIEF, EV)), Signal(11, INT)],
        11,
        Decision(Cause.INTERRUPT, send=KILL),
    ),
    "someone else stops the chief": (
        [*TRAINING, Exited(10, CHIEF, 4)],
        10 + SETTLE_S,
        Decision(Cause.STOPPED, send=STOP),
    ),
    "the chief is done": (DONE, 10, Decision(Cause.LINGERING, send=STOP, to=(W0, W1, PS))),
    "the evaluator is waited for": (SERVERS_GONE, 50, Decision(Cause.NOTHING, awaits=(EV,), wake_at=110)),
    "it may take its time while it tells": (
        [*SERVERS_GONE, Progressed(90, EV)],
        120,
        Decision(Cause.NOTHING, awaits=(EV,), wake_at=190),
    ),
    "it takes too long": ([*SERVERS_GONE, Progressed(90, EV)], 190, Decision(Cause.LINGERING, send=STOP)),
    "it ignores that": ([*SERVERS_GONE, Sent(110, STOP)], 110 + FAILURE_STOP_S, Decision(Cause.LINGERING, send=KILL)),
    "Ctrl-C while it is waited for": ([*SERVERS_GONE, Signal(20, INT)], 20, Decision(Cause.INTERRUPT, send=STOP)),
    "a worker is frozen": (
        [*TRAINING, Stalled(50, W1, frozen=True)],
        50,
        Decision(Cause.STALLED, send=KILL, to=(W1,)),
    ),
    "a frozen worker is killed": (
        [*TRAINING, Stalled(50, W1, frozen=True), Sent(50, KILL, (W1,))],
        51,
        Decision(Cause.NOTHING),
    ),
    "a frozen worker is replaced": (
        [*TRAINING, Stalled(50, W1, frozen=True), Sent(50, KILL, (W1,)), Exited(50.1, W1, -9)],
        51,
        AGAIN,
    ),
    "start deadline": (START, 100, Decision(Cause.OVERDUE, send=DUMP)),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_decide(case: str) -> None:
    history, now, expected = DECISIONS[case]
    assert decide(RunState.of(history), now, RULES) == expected


def test_twenty_kills_are_survived() -> None:
    history = list(TRAINING)
    for number in range(20):
        at = 10.0 * (number + 1)
        history.append(Exited(at, W1, -9))
        assert decide(RunState.of(history), at, RULES) == AGAIN
        history += [Spawned(at, W1), Ready(at + 1, W1)]
    history += [Finished(300, CHIEF), Exited(300, CHIEF, 0), Sent(300, STOP, (W0, W1, PS))]
    history += [*(Exited(301, task, 0) for task in (W0, W1, PS)), Exited(310, EV, 0)]
    verdict = conclude(history, 310, RULES)
    assert (verdict.status, verdict.failed_after_end, verdict.late, verdict.unfinished) == ("done", (), (), ())


VERDICTS: dict[str, tuple[list[Fact], str, ExitCode, str | None]] = {
    "in vain": ([*TRAINING, *deaths(W1, 3), Sent(13.7, STOP)], "failed", ExitCode.FAILED, W1),
    "a ps is killed, the chief notices": (
        [*TRAINING, Exited(10, PS, -9), Exited(10.3, CHIEF, 3), ErrorReported(10.3, CHIEF, CONSEQUENCE)],
        "failed",
        ExitCode.FAILED,
        PS,
    ),
    "a worker that lost its ps is not to blame": (
        [*TRAINING, Exited(9.9, W1, 3), ErrorReported(9.9, W1, CONSEQUENCE), Exited(10, PS, -9)],
        "failed",
        ExitCode.FAILED,
        PS,
    ),
    "nor is an evaluator": (
        [*TRAINING, Exited(9, EV, 3), ErrorReported(9, EV, CAUSE), GivenUp(9, EV), Exited(10, CHIEF, -11)],
        "failed",
        ExitCode.FAILED,
        CHIEF,
    ),
    "SIGTERM": (
        [
            *TRAINING,
            Signal(10, TERM),
            Sent(10, STOP, (CHIEF, EV)),
            Exited(10.1, EV, 0),
            Exited(12, CHIEF, 4),
            Sent(12, STOP),
            *(Exited(12.1, task, 0) for task in (W0, W1, PS)),
        ],
        "stopped",
        ExitCode.PREEMPTED,
        None,
    ),
    "SIGTERM, a server and the evaluator are killed": (
        [
            *TRAINING,
            Signal(10, TERM),
            Sent(10, STOP, (CHIEF, EV)),
            Exited(12, CHIEF, 4),
            Sent(12, STOP),
            *(Exited(12.1, task, 0) for task in (W0, W1)),
            Sent(40, KILL),
            Exited(40, PS, -9),
            Exited(40, EV, -9),
        ],
        "stopped",
        ExitCode.PREEMPTED,
        None,
    ),
    "SIGTERM, the chief is killed": (
        [
            *TRAINING,
            Signal(10, TERM),
            Sent(10, STOP, (CHIEF, EV)),
            Exited(10.1, EV, 0),
            Sent(40, KILL),
            *(Exited(40.1, task, -9) for task in (CHIEF, W0, W1, PS)),
        ],
        "failed",
        ExitCode.FAILED,
        CHIEF,
    ),
    "done": ([*SERVERS_GONE, Exited(20, EV, 0)], "done", ExitCode.DONE, None),
    "a worker fails, and the chief stops since it is told to": (
        [
            *TRAINING,
            *[Exited(10, W1, 3), ErrorReported(10, W1, CAUSE), Sent(10.7, STOP), Closed(11, CHIEF)],
            *[Exited(11, CHIEF, 4), *(Exited(11, task, 0) for task in (W0, PS, EV))],
        ],
        "failed",
        ExitCode.FAILED,
        W1,
    ),
    "the chief fails after a frozen worker was started again": (
        [
            *TRAINING,
            Stalled(50, W1, frozen=True),
            Sent(50, KILL, (W1,)),
            Exited(50.1, W1, -9),
            Spawned(50.2, W1),
            Ready(55, W1),
            Exited(60, CHIEF, 3),
            ErrorReported(60, CHIEF, CAUSE),
        ],
        "failed",
        ExitCode.FAILED,
        CHIEF,
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_conclude(case: str) -> None:
    history, status, code, culprit = VERDICTS[case]
    verdict = conclude(history, 90, RULES)
    assert (verdict.status, verdict.exit_code, verdict.culprit) == (status, code, culprit)
    assert verdict.unready == (case == "in vain")


def test_what_becomes_of_the_evaluator_after_the_end_is_told() -> None:
    died = conclude([*SERVERS_GONE, Exited(20, EV, -9)], 20, RULES)
    assert (died.status, died.failed_after_end, died.unfinished) == ("done", (EV,), ())
    ended = conclude([*SERVERS_GONE, Sent(110, STOP), Sent(115, KILL), Exited(115, EV, -9)], 115, RULES)
    assert (ended.status, ended.failed_after_end, ended.late, ended.unfinished) == ("done", (), (), (EV,))
    stopped = conclude([*SERVERS_GONE, Signal(20, INT), Sent(20, STOP), Exited(21, EV, 0)], 21, RULES)
    assert (stopped.status, stopped.exit_code, stopped.unfinished) == ("done", ExitCode.DONE, ())


def test_who_came_late_is_not_who_was_started_again() -> None:
    history = [*START, Ready(1, CHIEF), Exited(5, W0, -9), Spawned(5, W0), Ready(6, W1), Sent(100, STOP)]
    assert conclude(history, 101, RULES).silent == (PS,)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([Exited(10, W0, -9)], Decision(Cause.NOTHING, respawn=(W0,))),
        ([Exited(10, W0, 0)], Decision(Cause.NOTHING, over=True)),
        ([Exited(10, W0, 3), ErrorReported(10, W0, CONSEQUENCE)], Decision(Cause.FAILURE, over=True)),
        (deaths(W0, 3, since=7), Decision(Cause.FAILURE, over=True)),
        ([Signal(5, TERM)], Decision(Cause.TERMINATE, send=STOP)),
        ([Signal(5, TERM), Sent(5, STOP)], Decision(Cause.TERMINATE, wake_at=5 + 30 + FAILURE_STOP_S)),
    ],
)
def test_a_worker_whose_chief_is_elsewhere(facts: list[Fact], expected: Decision) -> None:
    assert decide(RunState.of([*ALONE, *facts]), 10, LONE) == expected


def test_the_end_of_a_worker_whose_chief_is_elsewhere() -> None:
    assert conclude([*ALONE, Exited(10, W0, 0)], 10, LONE).status == "done"
    assert conclude([*ALONE, Signal(5, TERM), Sent(5, STOP), Exited(10, W0, 0)], 10, LONE).status == "done"
    killed = [*ALONE, Signal(5, TERM), Sent(5, STOP), Sent(40, KILL), Exited(40, W0, -9)]
    assert conclude(killed, 41, LONE).status == "stopped"
    assert conclude([*ALONE, Exited(10, W0, 3)], 10, LONE).culprit == W0
