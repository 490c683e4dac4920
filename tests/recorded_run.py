"""A run directory with written events, for tests of reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import (
    EpochEnded,
    Event,
    ModelBuilt,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskFailed,
    TrainingStarted,
)
from distlaunch.base.run_dir import RunDir

START: dict[str, Any] = {
    "strategy": "multi_worker_mirrored", "loop": "fit", "replicas": 4, "tasks": 4, "global_batch": 64, "epochs": 3,
    "steps_per_epoch": 10, "parameters": 4321,
}  # fmt: skip


def record(path: Path, attempt: int, task: str, *events: Event) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = EventWriter(path, attempt=attempt, task=task)
    for event in events:
        writer.write(event)
    writer.close()


def done(step: int, loss: float) -> StepsDone:
    return StepsDone(epoch=step // 10, step=step, step_in_epoch=step % 10, steps=1, seconds=0.1, logs={"loss": loss})


def ended(number: int, loss: float, **more: float) -> EpochEnded:
    return EpochEnded(
        epoch=number, step=10 * number + 10, seconds=1.5, logs={"loss": loss, "val_loss": 2 * loss, **more}
    )


def timed(steps: int, seconds: float, examples: float) -> StepsTimed:
    return StepsTimed(
        steps=steps, seconds=seconds, examples=examples, input_s=seconds / 4, step_median_s=0.1, step_p99_s=0.2,
        cpu_s=2 * seconds, cores=4, memory_bytes=512 << 20,
    )  # fmt: skip


def make_run(run: RunDir) -> RunDir:
    """Write a run that was killed after step 23, and continued from step 20."""
    run.path.mkdir(parents=True)
    run.config.write_text("")
    steps = [done(step, 100.0 / step) for step in range(1, 21)]
    first = TrainingStarted(**START, first_epoch=0, first_step=0)
    layers = [{"name": "dense", "kind": "Dense", "output": "float32[?,3]", "parameters": 51, "trainable": True}]
    lost = TaskFailed(failed_task="worker:1", host="box", reason="killed by SIGKILL", log=str(run.path / "worker.log"))
    (run.path / "worker.log").write_text("the last words\n")
    record(run.events, 0, "worker:0", first, ModelBuilt(layers=layers), *steps[:10], ended(0, 8.0), *steps[10:],
           ended(1, 6.0), timed(10, 2.0, 640), timed(19, 3.8, 1216), done(23, 99.0), lost)  # fmt: skip
    again = TrainingStarted(**START, first_epoch=2, first_step=20)
    end = RunEnded(status="done", step=30, epochs_done=3, seconds=9.0)
    record(run.events, 1, "worker:0", again, done(25, 4.0), done(30, 3.0), ended(2, 3.0), timed(9, 0.9, 576), end)
    record(run.task(0, "worker:1").events, 0, "worker:1", timed(10, 3.0, 640))
    for attempt in (0, 1):
        run.write_json(run.attempt_plan(attempt), {"mode": "train"})
    return run


def data_of(text: str) -> dict[str, Any]:
    """Return the data in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))
