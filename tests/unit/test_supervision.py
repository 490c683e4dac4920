"""Decisions and verdicts that follow from the histories of tasks."""

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
    Ready,
    Rules,
    Saving,
    Sent,
    Signal,
    Spawned,
    Stalled,
    Training,
)
from distlaunch.supervise.policy import FAILURE_STOP_S, LOCKSTEP_STOP_S, SETTLE_S, Decision, decide
from distlaunch.supervise.state import Cause, RunState
from distlaunch.supervise.verdict import conclude

RULES = Rules(chief="worker:0", needs_finish=True, start_timeout_s=100, stop_timeout_s=30)
LOCKSTEP = dataclasses.replace(RULES, needs_every_task=True)
EVALUATION = Rules(chief="worker:0", needs_finish=False, start_timeout_s=100, stop_timeout_s=30)
A, B = "worker:0", "worker:1"
STOP, KILL, DUMP = Order
CONFIG, CAUSE, CONSEQUENCE = ErrorRole
START: list[Fact] = [Spawned(0, A), Spawned(0, B)]
TRAINING: list[Fact] = [*START, Ready(1, A), Ready(1, B), Training(2)]
DUMPED = Sent(100, DUMP)
INT, TERM = signal.SIGINT, signal.SIGTERM

DECISIONS = {
    "starting": (START, 5, Decision(Cause.NOTHING, wake_at=100)),
    "start deadline": (START, 100, Decision(Cause.OVERDUE, send=DUMP)),
    "start deadline, dumped": ([*START, DUMPED], 100, Decision(Cause.OVERDUE, wake_at=100.5)),
    "start deadline, stop": ([*START, DUMPED], 100.5, Decision(Cause.OVERDUE, send=STOP)),
    "start deadline, told": ([*START, DUMPED, Sent(100.5, STOP)], 101, Decision(Cause.OVERDUE, wake_at=105.5)),
    "start deadline, kill": ([*START, DUMPED, Sent(100.5, STOP)], 105.5, Decision(Cause.OVERDUE, send=KILL)),
    "stalled": ([*TRAINING, Stalled(50, B, frozen=False)], 50, Decision(Cause.STALLED, send=DUMP)),
    "stalled, dumped": (
        [*TRAINING, Stalled(50, B, frozen=False), Sent(50, DUMP)],
        50.1,
        Decision(Cause.STALLED, wake_at=50.5),
    ),
    "stalled, stop": (
        [*TRAINING, Stalled(50, B, frozen=False), Sent(50, DUMP)],
        50.5,
        Decision(Cause.STALLED, send=STOP),
    ),
    "stalled, kill": (
        [*TRAINING, Stalled(50, B, frozen=True), Sent(50, DUMP), Sent(50.5, STOP)],
        50.5 + FAILURE_STOP_S,
        Decision(Cause.STALLED, send=KILL),
    ),
    "training has no deadline": (TRAINING, 5000, Decision(Cause.NOTHING)),
    "failure settles": ([*TRAINING, Exited(10, B, 1)], 10, Decision(Cause.FAILURE, wake_at=10 + SETTLE_S)),
    "failure, stop": ([*TRAINING, Exited(10, B, 1)], 10.8, Decision(Cause.FAILURE, send=STOP)),
    "failure, kill": (
        [*TRAINING, Exited(10, B, 1), Sent(10.8, STOP)],
        10 + SETTLE_S + FAILURE_STOP_S,
        Decision(Cause.FAILURE, send=KILL),
    ),
    "failure, all gone": ([*TRAINING, Exited(10, B, 1), Exited(10.2, A, 1)], 10.2, Decision(Cause.FAILURE, over=True)),
    "early exit 0": ([*TRAINING, Exited(10, B, 0)], 11, Decision(Cause.FAILURE, send=STOP)),
    "exit 0 after its end": ([*TRAINING, Finished(9, B), Exited(10, B, 0)], 99, Decision(Cause.NOTHING)),
    "exit 0 after the run's end": ([*TRAINING, Finished(9, A), Exited(10, B, 0)], 99, Decision(Cause.NOTHING)),
    "chief done, worker lingers": (
        [*TRAINING, Finished(9, A), Exited(10, A, 0)],
        20,
        Decision(Cause.NOTHING, wake_at=40),
    ),
    "chief done, worker is ended": (
        [*TRAINING, Finished(9, A), Exited(10, A, 0)],
        40,
        Decision(Cause.LINGERING, send=STOP),
    ),
    "Ctrl-C": ([*TRAINING, Signal(10, INT)], 10, Decision(Cause.INTERRUPT, send=STOP)),
    "Ctrl-C, waiting": ([*TRAINING, Signal(10, INT), Sent(10, STOP)], 11, Decision(Cause.INTERRUPT, wake_at=40)),
    "Ctrl-C, too late": ([*TRAINING, Signal(10, INT), Sent(10, STOP)], 40, Decision(Cause.INTERRUPT, send=KILL)),
    "Ctrl-C told twice": (
        [*TRAINING, Signal(10, INT), Signal(10.01, INT), Sent(10.01, STOP)],
        11,
        Decision(Cause.INTERRUPT, wake_at=40),
    ),
    "Ctrl-C twice": (
        [*TRAINING, Signal(10, INT), Sent(10, STOP), Signal(11, INT)],
        11,
        Decision(Cause.INTERRUPT, send=KILL),
    ),
    "Ctrl-C before training": ([*START, Signal(10, INT), Sent(10, STOP)], 11, Decision(Cause.INTERRUPT, wake_at=15)),
    "SIGTERM twice is patient": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP), Signal(12, TERM)],
        12,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "Ctrl-C after SIGTERM": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP), Signal(12, INT)],
        12,
        Decision(Cause.TERMINATE, send=KILL),
    ),
    "a failure while stopping": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP), Exited(11, B, -9)],
        12,
        Decision(Cause.TERMINATE, wake_at=11 + SETTLE_S + FAILURE_STOP_S),
    ),
    "stopped by someone else": ([*TRAINING, Exited(10, B, 4)], 11, Decision(Cause.STOPPED, send=STOP)),
    "killed, waiting": (
        [*TRAINING, Signal(1, INT), Sent(1, STOP), Sent(2, KILL)],
        3,
        Decision(Cause.INTERRUPT, wake_at=12),
    ),
    "nothing can end it": (
        [*TRAINING, Signal(1, INT), Sent(1, STOP), Sent(2, KILL)],
        12,
        Decision(Cause.INTERRUPT, wake_at=12, over=True),
    ),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_decide(case: str) -> None:
    history, now, expected = DECISIONS[case]
    assert decide(RunState.of(history), now, RULES) == expected


LATE_LAUNCHER = {
    "training began in time, and is noticed late": ([*START, Training(110)], 110, Decision(Cause.NOTHING)),
    "stacks first": (START, 200, Decision(Cause.OVERDUE, send=DUMP)),
    "then time to write them": ([*START, Sent(200, DUMP)], 200, Decision(Cause.OVERDUE, wake_at=200.5)),
    "then SIGTERM": ([*START, Sent(200, DUMP)], 200.5, Decision(Cause.OVERDUE, send=STOP)),
    "training began after the stacks": (
        [*START, DUMPED, Training(100.2)],
        100.5,
        Decision(Cause.OVERDUE, send=STOP),
    ),
}


@pytest.mark.parametrize("case", LATE_LAUNCHER)
def test_a_launcher_that_was_suspended_is_not_hasty(case: str) -> None:
    history, now, expected = LATE_LAUNCHER[case]
    assert decide(RunState.of(history), now, RULES) == expected


KILLED: list[Fact] = [*TRAINING, Exited(10, B, -signal.SIGKILL)]
TOLD: list[Fact] = [*KILLED, Sent(10, STOP)]
SAVES = Saving(10, A)
KILL_AT = 10 + LOCKSTEP_STOP_S
LOCKSTEP_DECISIONS = {
    "killed: no peer's fault": (KILLED, 10, Decision(Cause.FAILURE, send=STOP)),
    "killed, told": (TOLD, 10.1, Decision(Cause.FAILURE, wake_at=KILL_AT)),
    "killed, kill": (TOLD, KILL_AT, Decision(Cause.FAILURE, send=KILL)),
    "killed, the chief saves": ([*TOLD, SAVES], KILL_AT, Decision(Cause.FAILURE, wake_at=40)),
    "killed, the chief has saved": ([*TOLD, SAVES, Saving(13, A, over=True)], 13, Decision(Cause.FAILURE, send=KILL)),
    "killed, the chief saves for too long": ([*TOLD, SAVES], 40, Decision(Cause.FAILURE, send=KILL)),
    "killed, the chief saves, Ctrl-C twice": (
        [*TOLD, SAVES, Signal(11, INT), Signal(12, INT)],
        12,
        Decision(Cause.FAILURE, send=KILL),
    ),
    "killed before training": (
        [*START, Exited(10, B, -signal.SIGKILL), Sent(10, STOP)],
        11,
        Decision(Cause.FAILURE, wake_at=10 + FAILURE_STOP_S),
    ),
    "an exception settles": ([*TRAINING, Exited(10, B, 1)], 10, Decision(Cause.FAILURE, wake_at=10 + SETTLE_S)),
    "an exception, kill": (
        [*TRAINING, Exited(10, B, 1), Sent(10 + SETTLE_S, STOP)],
        10 + SETTLE_S + LOCKSTEP_STOP_S,
        Decision(Cause.FAILURE, send=KILL),
    ),
    "a failure while stopping": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP), Exited(11, B, -signal.SIGKILL)],
        11,
        Decision(Cause.TERMINATE, wake_at=11 + SETTLE_S + LOCKSTEP_STOP_S),
    ),
    "a failure while the chief saves before it stops": (
        [*TRAINING, Signal(10, TERM), Sent(10, STOP), Exited(11, B, -signal.SIGKILL), SAVES],
        20,
        Decision(Cause.TERMINATE, wake_at=40),
    ),
    "stalled: all may still stop together": (
        [*TRAINING, Stalled(50, B, frozen=False), Sent(50, DUMP), Sent(50.5, STOP)],
        50.5 + LOCKSTEP_STOP_S,
        Decision(Cause.STALLED, wake_at=50.5 + FAILURE_STOP_S),
    ),
    "stalled in a callback": (
        [*TRAINING, Stalled(50, A, frozen=False), SAVES, Sent(50, DUMP), Sent(50.5, STOP), Exited(51, B, 4)],
        52,
        Decision(Cause.STALLED, wake_at=50.5 + 30),
    ),
}


@pytest.mark.parametrize("case", LOCKSTEP_DECISIONS)
def test_nobody_waits_for_tasks_that_can_only_hang(case: str) -> None:
    history, now, expected = LOCKSTEP_DECISIONS[case]
    assert decide(RunState.of(history), now, LOCKSTEP) == expected


VERDICTS: dict[str, tuple[list[Fact], str, ExitCode, str | None]] = {
    "done": ([*TRAINING, Finished(9, A), Exited(10, A, 0), Exited(10, B, 0)], "done", ExitCode.DONE, None),
    "killed": ([*TRAINING, Exited(10, B, -9), Exited(10.2, A, 1)], "failed", ExitCode.FAILED, B),
    "first exit wins": ([*TRAINING, Exited(10, A, 1), Exited(10.2, B, 1)], "failed", ExitCode.FAILED, A),
    "a consequence comes first": (
        [*TRAINING, Exited(10, A, 3), ErrorReported(10, A, CONSEQUENCE), Exited(10.5, B, -11)],
        "failed",
        ExitCode.FAILED,
        B,
    ),
    "the cause has told but not ended": (
        [
            *TRAINING,
            Exited(10, A, 3),
            ErrorReported(10, A, CONSEQUENCE),
            ErrorReported(10, B, CAUSE),
            Sent(10.7, STOP),
        ],
        "failed",
        ExitCode.FAILED,
        B,
    ),
    "siblings that were stopped are not failures": (
        [*TRAINING, Exited(10, B, 1), Sent(10.7, STOP), Exited(10.8, A, -15)],
        "failed",
        ExitCode.FAILED,
        B,
    ),
    "early exit 0": ([*TRAINING, Exited(10, B, 0), Exited(10.1, A, 1)], "failed", ExitCode.FAILED, B),
    "a crash after the end": (
        [*TRAINING, Finished(9, A), Exited(10, A, 0), Exited(11, B, -6)],
        "done",
        ExitCode.DONE,
        None,
    ),
    "SIGTERM, all stop": (
        [*TRAINING, Signal(10, TERM), Exited(11, A, 4), Exited(11, B, 4)],
        "stopped",
        ExitCode.PREEMPTED,
        None,
    ),
    "SIGTERM, one is killed": (
        [*TRAINING, Signal(10, TERM), Exited(11, A, 4), Sent(40, KILL), Exited(40.1, B, -9)],
        "failed",
        ExitCode.FAILED,
        B,
    ),
    "SIGTERM, one fails": (
        [*TRAINING, Signal(10, TERM), Exited(11, A, 1), Sent(17, KILL), Exited(17.1, B, -9)],
        "failed",
        ExitCode.FAILED,
        A,
    ),
    "SIGTERM before training": (
        [*START, Signal(10, TERM), Exited(11, A, -15), Exited(11, B, -15)],
        "stopped",
        ExitCode.PREEMPTED,
        None,
    ),
    "SIGTERM at the very end": (
        [*TRAINING, Signal(10, TERM), Finished(10, A), Exited(11, A, 0), Exited(11, B, 0)],
        "done",
        ExitCode.DONE,
        None,
    ),
    "SIGTERM, then Ctrl-C": (
        [*TRAINING, Signal(10, TERM), Signal(11, INT), Sent(11, KILL), Exited(11, A, -9), Exited(11, B, -9)],
        "interrupted",
        ExitCode.PREEMPTED,
        None,
    ),
    "Ctrl-C": (
        [*TRAINING, Signal(10, INT), Exited(11, A, 4), Exited(11, B, 4)],
        "interrupted",
        ExitCode.PREEMPTED,
        None,
    ),
    "Ctrl-C twice": (
        [*TRAINING, Signal(10, INT), Signal(11, INT), Sent(11, KILL), Exited(11.1, A, -9), Exited(11.1, B, -9)],
        "interrupted",
        ExitCode.PREEMPTED,
        None,
    ),
    "stopped by someone else": ([*TRAINING, Exited(10, A, 4), Exited(10, B, 4)], "stopped", ExitCode.PREEMPTED, None),
    "a peer is lost while the chief writes the last checkpoint": (
        [*TRAINING, Exited(10, B, -9), Sent(10, STOP), Finished(11, A), Sent(11, KILL), Exited(11, A, -9)],
        "done",
        ExitCode.DONE,
        None,
    ),
    "a peer is lost while the chief writes the checkpoint it was asked for": (
        [*TRAINING, Signal(9, TERM), Exited(10, B, -9), Closed(11, A), Sent(11, KILL), Exited(11, A, -9)],
        "stopped",
        ExitCode.PREEMPTED,
        None,
    ),
    "config": (
        [*START, Exited(5, A, 1), Exited(5.1, B, 2), ErrorReported(5.1, B, CONFIG)],
        "failed",
        ExitCode.FAILED,
        B,
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_conclude(case: str) -> None:
    history, status, code, culprit = VERDICTS[case]
    verdict = conclude(history, 1000 if status != "done" else 12, RULES)
    assert (verdict.status, verdict.exit_code, verdict.culprit) == (status, code, culprit)


@pytest.mark.parametrize(("again", "late"), [([], (B,)), ([Signal(11, INT)], ())])
def test_who_does_not_stop_after_ctrl_c_is_named(again: list[Fact], late: tuple[str, ...]) -> None:
    """Not if a second Ctrl-C asked for it."""
    killed = [Sent(40, KILL), Exited(40.1, B, -9)]
    verdict = conclude([*TRAINING, Signal(10, INT), *again, Exited(11, A, 4), *killed], 41, RULES)
    assert (verdict.status, verdict.exit_code, verdict.late) == ("interrupted", ExitCode.PREEMPTED, late)


def test_an_evaluator_that_ended_early_is_not_when_all_were_asked_to_stop() -> None:
    rules = dataclasses.replace(RULES, optional=frozenset({"evaluator:0"}))
    early: list[Fact] = [Spawned(0, "evaluator:0"), Exited(1, "evaluator:0", 3), GivenUp(1, "evaluator:0")]
    history = [*early, *TRAINING, Exited(10, B, 4), Sent(10.7, STOP), Sent(40.7, KILL), Exited(40.8, A, -9)]
    verdict = conclude(history, 41, rules)
    assert (verdict.status, verdict.exit_code, verdict.culprit) == ("failed", ExitCode.FAILED, A)


def test_a_peer_is_lost_while_the_chief_writes_the_checkpoint_that_another_task_was_asked_for() -> None:
    history: list[Fact] = [*TRAINING, Exited(10, B, -9), Sent(10, STOP), Closed(11, A), Exited(11, A, 4)]
    assert conclude(history, 12, LOCKSTEP).exit_code == ExitCode.PREEMPTED


def test_silent_peers() -> None:
    history = [
        *TRAINING,
        Exited(10, A, 3),
        ErrorReported(10, A, CONSEQUENCE),
        Sent(10.7, STOP),
        Sent(16, KILL),
        Exited(16, B, -9),
    ]
    assert conclude(history, 17, RULES).silent == (B,)


def test_who_did_not_come() -> None:
    history = [*START, Ready(1, A), Sent(100, STOP), Exited(101, A, -15), Exited(101, B, -15)]
    verdict = conclude(history, 101, RULES)
    assert (verdict.why, verdict.silent) == (Cause.OVERDUE, (B,))


def test_evaluation_ends_with_exit_code_0() -> None:
    history = [*TRAINING, Exited(10, B, 0), Exited(11, A, 0)]
    assert decide(RunState.of(history), 11, EVALUATION) == Decision(Cause.NOTHING, over=True)
    assert conclude(history, 11, EVALUATION).status == "done"


def test_servers_end_with_the_chief() -> None:
    rules = Rules("chief:0", True, 100, 30, frozenset({"ps:0"}))
    history = [Spawned(0, "chief:0"), Spawned(0, "ps:0"), Training(1), Finished(9, "chief:0"), Exited(10, "chief:0", 0)]
    assert decide(RunState.of(history), 10, rules) == Decision(Cause.LINGERING, send=STOP)
    history += [Sent(10, STOP), Exited(10.1, "ps:0", -15)]
    assert conclude(history, 10.1, rules).status == "done"
    assert conclude(history, 10.1, rules).failed_after_end == ()


@pytest.mark.parametrize(("task", "culprit"), [(B, B), ("", None)])
def test_who_stalled_is_the_culprit(task: str, culprit: str | None) -> None:
    """Whatever the others say when they are stopped."""
    history: list[Fact] = [*TRAINING, Stalled(50, task, frozen=True), Sent(50, DUMP), Sent(50.5, STOP)]
    history += [ErrorReported(51, A, CAUSE), Exited(51, A, 3), Sent(55.5, KILL), Exited(55.6, B, -9)]
    verdict = conclude(history, 56, RULES)
    assert (verdict.status, verdict.why, verdict.culprit, verdict.frozen) == ("failed", Cause.STALLED, culprit, True)
