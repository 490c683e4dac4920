"""Tests of the notice about smaller batches when some data ends before others, and of the times of reports."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.events import Event, Notice, StepsTimed
from distlaunch.config.run import Data
from distlaunch.strategies.step_times import StepTimes
from distlaunch.training.step_timer import StepTimer

STREAMS = {"streams": 4}


def notices(sizes: list[float], *, each_call: int = 1, **keys: Any) -> list[str]:
    told: list[Event] = []
    data = Data.model_validate({"function": "m:f", "global_batch": 64, **keys})
    timer = StepTimer(told.append, None, data, clock=lambda: 0.0)  # pyright: ignore[reportArgumentType]
    timer.add(StepTimes((1.0,), 0.0, 64.0))  # the first call, which compiles, is not counted
    for at in range(0, len(sizes), each_call):
        part = sizes[at : at + each_call]
        timer.add(StepTimes((1.0,) * len(part), 0.0, sum(part)))
    return [event.message for event in told if isinstance(event, Notice)]


def test_streams_that_end_early_are_told_once() -> None:
    (message,) = notices([64.0] * 20 + [48.0] * 80, **STREAMS)
    assert "streams end before others" in message
    (message,) = notices([32.0] * 10 + [0.0] * 90, sharding="function")
    assert "some of the workers' data end before others" in message
    assert not notices([64.0] * 10 + [0.0] * 90), "without either, no part can end before others"


@given(st.integers(1, 40), st.integers(1, 64), st.integers(1, 20), st.sampled_from([1, 3, 10]))
def test_a_last_batch_that_is_smaller_is_no_news(full: int, last: int, epochs: int, each_call: int) -> None:
    whole = [*[64.0] * max(full, 10), float(last)]
    assert not notices(whole * epochs, each_call=each_call, **STREAMS)


def test_reports_are_frequent_at_first() -> None:
    """A run of a few seconds has a curve, and a long one few events."""
    told: list[Event] = []
    now = [0.0]
    train: Any = SimpleNamespace(work="", by_number=True, reads_all="", in_python=False)
    data = Data.model_validate({"function": "m:f", "global_batch": 64})
    timer = StepTimer(told.append, train, data, clock=lambda: now[0])
    times = []
    for step in range(36_000):
        now[0] = step / 10
        timer.add(StepTimes((0.1,), 0.0, 64.0))
        if len(told) > len(times):
            times.append(now[0])
    assert all(isinstance(event, StepsTimed) for event in told)
    assert len([at for at in times if at <= 3]) >= 5
    between = [round(later - earlier, 1) for earlier, later in itertools.pairwise(times)]
    assert between == sorted(between)
    assert len(times) < 3_600 / 5 + 15
