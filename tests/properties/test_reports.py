"""What `report` and `runs` say of a run follows from what happened to it, in any order of attempts."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import EpochEnded, RunEnded, StepsDone, TaskFailed, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.listing import summarize
from distlaunch.runs.report import KILLED, read_report
from distlaunch.supervise.run_events import last_end, write_end_again

STEPS = 3  # of an epoch
START = TrainingStarted(
    strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=9, first_epoch=0, first_step=0,
    steps_per_epoch=STEPS, parameters=1,
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """What happened to one: how many epochs it trained, whether it made steps beyond them, how it ended."""

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
        end = last_end(run) if run.finished() else None
        run.write_json(run.attempt_plan(number), {"mode": "train"})
        writer = EventWriter(run.events, attempt=number, task="worker:0")
        writer.write(dataclasses.replace(START, first_epoch=epoch, first_step=epoch * STEPS))
        for _ in range(attempt.epochs):
            epoch += 1
            step = epoch * STEPS
            writer.write(
                StepsDone(epoch=epoch - 1, step=step, step_in_epoch=STEPS, steps=STEPS, seconds=1.0, logs={"loss": 1.0})
            )
            writer.write(EpochEnded(epoch=epoch - 1, step=step, seconds=1.0, logs={"loss": 1.0}))
        step = epoch * STEPS + attempt.more_steps
        if attempt.more_steps:
            steps = attempt.more_steps
            writer.write(
                StepsDone(epoch=epoch, step=step, step_in_epoch=steps, steps=steps, seconds=1.0, logs={"loss": 1.0})
            )
        if attempt.end == "failed":
            writer.write(TaskFailed(failed_task="worker:0", host="here", reason="bug", log=""))
        if attempt.end != KILLED:
            writer.write(RunEnded(status=attempt.end, step=step, epochs_done=epoch, seconds=1.0))
        writer.close()
        if end is not None and _in_vain(attempt):
            write_end_again(run, end)
    return epoch
