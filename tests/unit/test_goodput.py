"""Where the wall time of a run went."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.event_files import read_events, read_outline, read_times
from distlaunch.base.events import (
    AttemptStarted,
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Event,
    Exported,
    ExportFailed,
    Notice,
    Restored,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskFailed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.runs.goodput import CATEGORIES, goodput_of, paused_s
from tests.conftest import GOLDEN

RECORDED = GOLDEN / "runs" / "killed_and_resumed.jsonl"


def start(first_step: int = 0) -> TrainingStarted:
    return TrainingStarted(
        strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=4, first_epoch=0,
        first_step=first_step, steps_per_epoch=10, parameters=1,
    )  # fmt: skip


def steps(step: int, seconds: float, num: int = 10) -> StepsDone:
    return StepsDone(epoch=0, step=step, step_in_epoch=step, steps=num, seconds=seconds, logs={"loss": 1.0})


def timed(num: int, seconds: float, input_s: float = 0.0) -> StepsTimed:
    return StepsTimed(
        steps=num, seconds=seconds, examples=8.0 * num, input_s=input_s, step_median_s=0.1, step_p99_s=0.2, cpu_s=1.0,
        cores=2,
    )  # fmt: skip


def epoch(number: int, step: int) -> EpochEnded:
    return EpochEnded(epoch=number, step=step, seconds=5.0, logs={"loss": 1.0})


def saved(step: int, stalled_s: float | None) -> CheckpointSaved:
    return CheckpointSaved(step=step, path="x", num_bytes=1, seconds=3.0, stalled_s=stalled_s)


def ended(status: str, seconds: float = 1.0) -> RunEnded:
    return RunEnded(status=status, step=1, epochs_done=0, seconds=seconds)


FAILED = TaskFailed(failed_task="worker:0", host="a", reason="bug", log="")
DATA = DataResolved(name="m", source="m")
UP = TaskStarted(host="a", pid=1)


def history(attempt: int, *events: tuple[float, Event]) -> list[Event]:
    return [dataclasses.replace(event, time=at, attempt=attempt) for at, event in events]


ONE = history(
    0, (102.0, AttemptStarted(waited_s=2.0)), (105.0, UP), (106.0, DATA), (108.0, start()),
    (113.0, steps(1, 4.0, num=1)), (122.0, steps(10, 9.0, num=9)), (125.0, epoch(0, 10)), (136.0, steps(20, 10.0)),
    (136.5, saved(10, 0.75)), (139.0, epoch(1, 20)), (141.0, timed(19, 19.0, input_s=3.8)),
    (143.5, Exported(format="keras", path="x")), (144.5, ExportFailed(step=20, reason="full")), (145.5, ended("done")),
)  # fmt: skip


def seconds_of(events: Sequence[Event]) -> dict[str, float]:
    found = goodput_of(events)
    assert found is not None
    return {name: round(value, 6) for name, value in found.seconds.items() if value}


def test_each_category() -> None:
    assert seconds_of(ONE) == {
        "hosts": 2, "start": 3, "build": 3 + 1, "compile": 3, "steps": 16, "data": 4, "validation": 6, "save": 0.75,
        "export": 3.5, "other": 0.25 + 3,
    }  # fmt: skip
    found = goodput_of(ONE)
    assert found is not None
    assert (found.wall_s, found.share) == (45.5, 16 / 45.5)
    assert paused_s(ONE) == 0


def test_steps_that_are_trained_again_are_lost() -> None:
    failed = history(
        0, (100.0, UP), (101.0, start()), (111.0, steps(10, 10.0)), (121.0, steps(20, 10.0)), (125.0, FAILED),
        (125.0, ended("failed")),
    )  # fmt: skip
    assert seconds_of(failed) == {"build": 1, "steps": 20, "lost": 4}, "not yet trained again"
    again = history(
        1, (200.0, AttemptStarted(waited_s=15.0)), (201.0, UP),
        (204.0, Restored(step=15, epoch=1, path="x", seconds=2)), (204.0, start(15)),
        (210.0, steps(20, 5.0, num=5)), (211.0, ended("stopped")),
    )  # fmt: skip
    assert seconds_of([*failed, *again]) == {
        "build": 1 + 1, "steps": 15 + 5, "lost": 4 + 5, "hosts": 15, "pauses": 60, "start": 1, "restore": 2 + 1,
        "other": 1,
    }  # fmt: skip
    assert paused_s([*failed, *again]) == 60
    earlier = history(2, (220.0, UP), (220.0, start(10)))
    assert seconds_of([*failed, *again, *earlier])["lost"] == 4 + 10 + 5


def test_the_other_attempts_tell_how_long_a_killed_one_waited_for_input() -> None:
    killed = history(1, (150.0, UP), (150.0, start(20)), (151.0, steps(21, 1.0, num=1)), (161.0, steps(31, 10.0)))
    assert seconds_of([*ONE, *killed])["data"] == pytest.approx(4 + 0.2 * 11)


def test_a_script_has_pauses_but_no_goodput() -> None:
    events = [*history(0, (100.0, ended("failed", 10.0))), *history(1, (190.0, ended("done", 60.0)))]
    assert goodput_of(events) is None
    assert paused_s(events) == 30
    assert goodput_of([]) is None


def test_a_recorded_run() -> None:
    """A task was killed at step 80 and restarted, then the launcher at step 86; 3.6 s later the run was resumed."""
    events = read_events(RECORDED)
    found = goodput_of(events)
    assert found is not None
    assert found.wall_s == pytest.approx(events[-1].time - events[0].time, abs=0.01)
    assert found.seconds["pauses"] == pytest.approx(1.1 + 3.9, abs=0.1)
    in_lost_steps = [0.34 + 1.09 + 0.31 + 1.08, 0.33]  # 41 to 80 of the first attempt, 81 to 86 of the second
    assert found.seconds["lost"] == pytest.approx(sum(in_lost_steps), abs=0.1)
    assert found.seconds["data"] > found.seconds["steps"], "each example takes 4 ms, on one thread"
    quick = goodput_of(read_times(RECORDED))
    assert quick is not None
    assert quick.seconds == pytest.approx(found.seconds)
    assert paused_s(read_outline(RECORDED)) == found.seconds["pauses"]


def test_quick_reading_joins_steps_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rows = history(
        0, (1.0, start()), *((float(at), steps(at, 0.25, num=1)) for at in range(2, 6)), (6.0, epoch(0, 5)),
        (7.0, steps(6, 1e-7, num=1)), (8.0, steps(7, float("inf"), num=1)),
    )  # fmt: skip
    rows = [dataclasses.replace(event, task="worker:0") for event in rows]
    lines = [event.to_json() for event in rows]
    path.write_text("\n".join([*lines, "{}", '{"event":"StepsDone","ti']))
    found = [(e.time, e.step, e.steps, e.seconds) for e in read_times(path) if isinstance(e, StepsDone)]
    assert found == [(2.0, 2, 1, 0.25), (5.0, 5, 3, 0.75), (7.0, 6, 1, 1e-7)]
    assert [e for e in read_times(path) if not isinstance(e, StepsDone)] == [rows[0], rows[5]]
    assert read_times(tmp_path / "none") == read_outline(tmp_path / "none") == []


def test_quick_reading_has_the_last_times_of_steps_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rows = history(
        0, (1.0, start()), (2.0, steps(1, 0.5, num=1)), (2.5, timed(1, 0.5)), (3.0, steps(2, 0.5, num=1)),
        (3.5, timed(2, 1.0)), (4.0, steps(3, 0.5, num=1)), (5.0, epoch(0, 3)), (6.0, steps(4, 0.5, num=1)),
        (6.5, timed(4, 2.0)),
    )  # fmt: skip
    rows = [dataclasses.replace(event, task="worker:0") for event in rows]
    path.write_text("".join(event.to_json() + "\n" for event in rows))
    found = read_times(path)
    assert [event.time for event in found] == [1.0, 2.0, 3.5, 4.0, 5.0, 6.0, 6.5]
    assert seconds_of(found) == seconds_of(rows)
    with path.open("a") as file:
        file.write(timed(5, 2.5).to_json()[:-9])
    assert read_times(path) == found, "a line that is still being written"


def test_the_outline_has_the_starts_and_ends_of_attempts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = history(0, (1.0, AttemptStarted(waited_s=0.0)), (2.0, UP), (3.0, start()), (4.0, steps(1, 1.0, num=1)))
    second = history(1, (9.0, AttemptStarted(waited_s=2.0)), (9.5, UP), (10.0, start()), (11.0, steps(1, 1.0, num=1)))
    path.write_text("\n".join(event.to_json() for event in [*first, *second]))
    assert [event.time for event in read_outline(path)] == [1.0, 2.0, 3.0, 4.0, 9.0, 9.5, 10.0, 11.0]
    assert paused_s(read_outline(path)) == paused_s([*first, *second]) == 3.0


_S = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100)
_STEP = st.integers(-5, 200)
_EVENTS = st.one_of(
    st.builds(AttemptStarted, waited_s=_S), st.just(UP), st.just(DATA), st.builds(start, _STEP),
    st.builds(steps, _STEP, _S, st.integers(-2, 50)), st.builds(epoch, st.integers(0, 9), _STEP),
    st.builds(timed, st.integers(-1, 100), _S, _S), st.builds(saved, _STEP, st.none() | _S), st.just(FAILED),
    st.builds(ended, st.sampled_from(["done", "failed", "stopped"]), _S), st.just(Notice(level="info", message="x")),
    st.builds(Restored, step=_STEP, epoch=st.just(0), path=st.just("x"), seconds=_S),
)  # fmt: skip


@given(st.lists(st.tuples(st.floats(-10, 50), st.integers(0, 2), _EVENTS), max_size=40))
def test_the_categories_add_up_to_the_wall_time(history: list[tuple[float, int, Event]]) -> None:
    events, at, attempt = list[Event](), 1000.0, 0
    for elapsed, forward, event in history:
        at, attempt = at + elapsed, attempt + (forward == 2)
        events.append(dataclasses.replace(event, time=at, attempt=attempt))
    found = goodput_of(events)
    if found is None:
        assert not any(isinstance(event, TrainingStarted) for event in events)
        return
    assert list(found.seconds) == list(CATEGORIES)
    assert all(value >= -1e-9 for value in found.seconds.values())
    first = events[0]
    before = (
        first.waited_s if isinstance(first, AttemptStarted) else first.seconds if isinstance(first, RunEnded) else 0
    )
    before = before if 0 < before < float("inf") else 0.0
    wall_s = max(event.time for event in events) - first.time + before
    assert found.wall_s == pytest.approx(wall_s, abs=1e-6, rel=1e-9)
    assert 0 <= found.share <= 1 + 1e-9
