"""When the clock asks for a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from distlaunch.base.events import Event, RunEnded, StepsDone, TaskStarted, TrainingStarted
from distlaunch.training.checkpoints.interval import (
    FIRST_S,
    PRIOR_S,
    Failures,
    SaveTimer,
    best_interval_s,
    past_failures,
)

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
    assert best_interval_s(between_s, stalled_s, writing_s) == pytest.approx(expected_s)


def test_it_loses_less_than_others() -> None:
    """What Young's formula is for: time that stands still, and steps that are done again after a failure."""
    between_s, stalled_s = 3600.0, 2.0

    def lost(interval_s: float) -> float:
        return stalled_s / interval_s + interval_s / 2 / between_s

    best = best_interval_s(between_s, stalled_s, 0)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_failures_are_counted_by_attempts_that_trained() -> None:
    events = [
        *attempt(0, 100, 400, "failed"), *attempt(1, 500, 600, "stopped"), *attempt(2, 700, 900, None),
        replace(TaskStarted(host="h", pid=1), time=950, attempt=3),
    ]  # fmt: skip
    assert past_failures(events) == Failures(2, 600)
    assert past_failures([]).mean_s_between(1e6) == PRIOR_S
    assert past_failures(events).mean_s_between(100) == 350


def test_minutes_count_from_the_last_one() -> None:
    timer = SaveTimer(120, auto=False, failures=Failures(), now=1000)
    assert [timer.is_due(now) for now in (1000, 1119, 1120, 1200)] == [False, False, True, True]
    timer.took(1200)
    assert [timer.is_due(now) for now in (1319, 1320)] == [False, True]


def test_auto_learns_what_one_costs() -> None:
    timer = SaveTimer(None, auto=True, failures=Failures(1, 5000), now=0)
    assert timer.interval_s(0) == FIRST_S
    timer.took(60)
    timer.learn(stalled_s=2, writing_s=9)
    assert timer.interval_s(2200) == pytest.approx(math.sqrt(2 * 7200 * 2))
    assert SaveTimer(30, auto=True, failures=Failures(), now=0).interval_s(0) == 30


def test_without_a_period_no_clock_counts() -> None:
    assert not SaveTimer(None, auto=False, failures=Failures(), now=0).is_due(1e9)
