"""When a checkpoint is due."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from distlaunch.base.events import Event, RunEnded, StepsDone, TaskStarted, TrainingStarted
from distlaunch.checkpoints.policy import (
    FIRST_S,
    PRIOR_S,
    AnyOf,
    CheapestInterval,
    EveryEpochs,
    EverySeconds,
    EverySteps,
    Failures,
    Moment,
    SaveContext,
    SaveDecision,
    SavePolicy,
    cheapest_interval_s,
    past_failures,
    save_decision,
)
from distlaunch.config.run import Checkpoint

STARTED = TrainingStarted(
    strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=1, epochs=1, first_epoch=0, first_step=0,
    steps_per_epoch=1, parameters=1,
)  # fmt: skip


def attempt(number: int, began: float, ended: float, status: str | None) -> list[Event]:
    """None: killed without a word."""
    steps = StepsDone(epoch=0, step=1, step_in_epoch=1, steps=1, seconds=1, logs={})
    events = [replace(STARTED, time=began, attempt=number), replace(steps, time=ended, attempt=number)]
    if status is not None:
        last = RunEnded(status=status, step=1, epochs_done=0, seconds=1.0)
        events.append(replace(last, time=ended, attempt=number))
    return events


@pytest.mark.parametrize(
    ("between_s", "stalled_s", "writing_s", "expected_s"),
    [(7200, 4, 4, 240), (7200, 1, 4, 120), (PRIOR_S, 0.5, 10, math.sqrt(PRIOR_S)), (60, 0.1, 30, 30), (9, 0, 2, 2)],
)
def test_the_interval_that_loses_least(between_s: float, stalled_s: float, writing_s: float, expected_s: float) -> None:
    assert cheapest_interval_s(between_s, stalled_s, writing_s) == pytest.approx(expected_s)


def test_it_loses_less_than_others() -> None:
    """Young's formula minimizes the time of saving plus that of steps that are repeated after a failure."""
    between_s, stalled_s = 3600.0, 2.0

    def lost(interval_s: float) -> float:
        return stalled_s / interval_s + interval_s / 2 / between_s

    best = cheapest_interval_s(between_s, stalled_s, 0)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_failures_are_counted_by_attempts_that_trained() -> None:
    events = [
        *attempt(0, 100, 400, "failed"), *attempt(1, 500, 600, "stopped"), *attempt(2, 700, 900, None),
        replace(TaskStarted(host="h", pid=1), time=950, attempt=3),
    ]  # fmt: skip
    assert past_failures(events) == Failures(2, 600)
    assert past_failures([]).mean_s_between(1e6) == PRIOR_S
    assert past_failures(events).mean_s_between(100) == 350


def due(policy: SavePolicy, now_s: float) -> bool:
    return policy.should_save(SaveContext(Moment.STEP, now_s=now_s))


def test_minutes_count_from_the_last_one() -> None:
    policy = EverySeconds(120, 1000)
    assert [due(policy, now) for now in (1000, 1119, 1120, 1200)] == [False, False, True, True]
    policy.saved(1200)
    assert [due(policy, now) for now in (1319, 1320)] == [False, True]


def test_auto_learns_what_one_costs() -> None:
    policy = CheapestInterval(Failures(1, 5000), 0)
    assert policy.interval_s(0) == FIRST_S
    policy.saved(60)
    policy.learn(stalled_s=2, writing_s=9)
    assert policy.interval_s(2200) == pytest.approx(math.sqrt(2 * 7200 * 2))


def decision(now_s: float = 0, **section: Any) -> SaveDecision:
    return save_decision(Checkpoint(**{"every_epochs": None, **section}), Failures(), now_s)


def test_the_shortest_of_several_intervals_counts() -> None:
    both = decision(every_minutes=0.5, every="auto")
    at = [SaveContext(Moment.STEP, now_s=now) for now in (29, 30, 89, 90)]
    assert [both.chief_asks(one) for one in at[:2]] == [False, True]
    both.saved(60)
    assert [both.chief_asks(one) for one in at[2:]] == [False, True]


def test_without_a_period_no_clock_counts() -> None:
    assert not decision(every_steps=5).chief_asks(SaveContext(Moment.STEP, now_s=1e9))


@pytest.mark.parametrize(
    ("at", "saves"),
    [
        (SaveContext(Moment.STEP, 4), False),
        (SaveContext(Moment.STEP, 5), True),
        (SaveContext(Moment.STEP, 4, chief_asks=True), True),
        (SaveContext(Moment.EPOCH_END, 5, epoch=1), False),
        (SaveContext(Moment.EPOCH_END, 6, epoch=2), True),
        (SaveContext(Moment.EPOCH_END, 6, epoch=2, is_last=True), False),
        (SaveContext(Moment.EPOCH_END, 6, epoch=2, is_last=True, chief_asks=True), True),
        (SaveContext(Moment.STOP, 4), True),
        (SaveContext(Moment.END, 4), True),
    ],
)
def test_each_moment_has_its_policy(at: SaveContext, saves: bool) -> None:
    assert decision(every_steps=5, every_epochs=2).should_save(at) is saves


def test_the_clock_is_no_matter_of_all_tasks() -> None:
    late = SaveContext(Moment.STEP, now_s=1e9)
    timed = decision(every_minutes=1)
    assert timed.chief_asks(late)
    assert not timed.should_save(late), "before all have heard of it"


def test_a_call_ends_where_a_checkpoint_is_due() -> None:
    policies = AnyOf([EverySteps(10), EverySteps(4), EveryEpochs(1)])
    assert [policies.steps_until_due(step) for step in (0, 4, 9, 10)] == [4, 4, 1, 2]
    assert decision(every_epochs=1).steps_until_due(3) is None
