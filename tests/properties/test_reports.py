"""Tests that `report` and `runs` show what has happened to a run, for attempts in any order."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import EpochEnded, Restored, RunEnded, StepsDone, TaskFailed, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.earlier_state import EarlierState
from distlaunch.runs.listing import summarize
from distlaunch.runs.report import KILLED, read_report

STEPS = 3  # of an epoch
START = TrainingStarted(
    strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=9, first_epoch=0, first_step=0,
    steps_per_epoch=STEPS, parameters=1,
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """Number of epochs that an attempt trained, number of steps beyond them, and how the attempt ended."""

    epochs: int
    more_steps: int
    end: str


attempts = st.builds(
    Attempt,
    st.integers(0, 3),
    st.integers(0, STEPS - 1),
    st.sampled_from(["done", "failed", "stopped", "interrupted", KILLED]),
)


@given(st.lists(attempts, min_size=1, max_size=5))
def test_histories(history: list[Attempt]) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name, "job"))
        run.path.mkdir()
        run.config.write_text("strategy: {kind: one_device}\n")
        epochs = _write(run, history)
        report, line = read_report(run), summarize(run)
    assert [each.status for each in report.attempts] == [each.end for each in history]
    expected = _status(history)
    assert report.status == line.status == expected
    assert [(event.epoch, event.step) for event in report.epochs] == [(n, (n + 1) * STEPS) for n in range(epochs)]
    assert line.epoch == epochs
    assert line.attempts == len(history)
    assert line.step >= epochs * STEPS
    # the value of an epoch is its number; before the first has ended, that of its steps
    shown = line.logs.get("loss")
    assert shown == epochs if epochs else shown in (None, 0.5)


def test_values_are_those_of_the_epoch_that_is_shown(tmp_path: Path) -> None:
    """A launcher is killed in its fifth epoch, and the run goes on from the checkpoint of the second."""
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("strategy: {kind: one_device}\n")
    _write(run, [Attempt(4, 2, KILLED)])
    killed = summarize(run)
    assert (killed.status, killed.epoch, killed.step, killed.logs) == (KILLED, 4, 4 * STEPS + 2, {"loss": 4})
    run.write_json(run.attempt_plan(1), {"mode": "train"})
    with contextlib.closing(EventWriter(run.events, attempt=1, task="worker:0")) as writer:
        writer.write(Restored(path="x", step=2 * STEPS, epoch=2))
        assert (summarize(run).epoch, summarize(run).step, summarize(run).logs) == (2, 2 * STEPS, {"loss": 2})
        writer.write(dataclasses.replace(START, first_epoch=2, first_step=2 * STEPS))
        step = 2 * STEPS + 1
        for _ in range(2_000):  # more than one look at the end of the file takes in
            writer.write(StepsDone(epoch=2, step=step, step_in_epoch=1, steps=1, seconds=1.0, logs={"loss": 7.0}))
        assert (summarize(run).epoch, summarize(run).step, summarize(run).logs) == (2, step, {"loss": 2})
        writer.write(EpochEnded(epoch=2, step=3 * STEPS, seconds=1.0, logs={"loss": 30.0, "val_loss": 3.0}))
        found = summarize(run)
    assert (found.epoch, found.step, found.logs) == (3, 3 * STEPS, {"loss": 30.0, "val_loss": 3.0})


def _status(history: list[Attempt]) -> str:
    """A failed attempt that made no step leaves a finished run finished."""
    status = history[0].end
    for each in history[1:]:
        if not (status == "done" and _in_vain(each)):
            status = each.end
    return status


def _in_vain(attempt: Attempt) -> bool:
    return attempt.end == "failed" and not attempt.epochs and not attempt.more_steps


def _write(run: RunDir, history: list[Attempt]) -> int:
    """Writes the events of all attempts; returns how many epochs they have trained."""
    epoch = 0
    for number, attempt in enumerate(history):
        earlier = EarlierState.of(run)
        run.write_json(run.attempt_plan(number), {"mode": "train"})
        writer = EventWriter(run.events, attempt=number, task="worker:0")
        writer.write(dataclasses.replace(START, first_epoch=epoch, first_step=epoch * STEPS))
        for _ in range(attempt.epochs):
            epoch += 1
            step = epoch * STEPS
            writer.write(
                StepsDone(epoch=epoch - 1, step=step, step_in_epoch=STEPS, steps=STEPS, seconds=1.0, logs={"loss": 0.5})
            )
            writer.write(EpochEnded(epoch=epoch - 1, step=step, seconds=1.0, logs={"loss": float(epoch)}))
        step = epoch * STEPS + attempt.more_steps
        if attempt.more_steps:
            steps = attempt.more_steps
            writer.write(
                StepsDone(epoch=epoch, step=step, step_in_epoch=steps, steps=steps, seconds=1.0, logs={"loss": 0.5})
            )
        if attempt.end == "failed":
            writer.write(TaskFailed(failed_task="worker:0", host="here", reason="bug", log=""))
        if attempt.end != KILLED:
            writer.write(RunEnded(status=attempt.end, step=step, epochs_done=epoch, seconds=1.0))
        writer.close()
        if _in_vain(attempt):
            earlier.restore(run, number)
    return epoch
