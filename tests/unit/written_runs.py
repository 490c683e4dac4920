"""Writes the directories of runs that were never started, below `runs` in the current directory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from distlaunch.base.events import (
    AttemptStarted,
    EpochEnded,
    Event,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.run_dir import RunDir

STARTED = 1_790_000_000.0
EPOCH_S, STEPS = 20.0, 10
"""Seconds of an epoch, half of them in its steps, and their number."""
_CONFIG: dict[str, Any] = {
    "name": "",
    "model": {"function": "/work/m.py:model", "args": {"units": 8}},
    "data": {"function": "/work/m.py:data", "args": {}, "global_batch": 32},
    "compile": {"optimizer": {"name": "sgd", "args": {"learning_rate": 0.01}}, "loss": "mse", "metrics": ["accuracy"]},
    "train": {"epochs": 3},
    "strategy": {"kind": "one_device"},
}


def write_run(
    name: str,
    settings: Mapping[str, Any],
    losses: Sequence[float],
    *,
    accuracy: Sequence[float] = (),
    status: str = "done",
    started: float | None = None,
    pause_s: float = 0.0,
    optimizer: str = "",
) -> RunDir:
    """Write a run whose epochs have these validation losses.

    Args:
        settings: values of config keys such as `train.epochs`.
        status: the status at its end. A run without epochs has no end.
        started: when it started; by default a minute after the last run.
        pause_s: seconds of a pause after the first epoch, in which the run was stopped.
        optimizer: as the start of training reports it.
    """
    run = RunDir(Path("runs") / name)
    others = [path for path in run.path.parent.glob("*") if path.is_dir()]
    run.path.mkdir(parents=True)
    config = copy.deepcopy(_CONFIG)
    for key, value in {"name": name, **settings}.items():
        section, *inner = key.split(".")
        at, last = config, section
        for part in inner:
            at, last = at.setdefault(last, {}), part
        at[last] = value
    run.config.write_text(yaml.safe_dump(config, sort_keys=False))
    at_s, attempt, lines = STARTED + 60.0 * len(others) if started is None else started, 0, list[str]()

    def add(seconds: float, *events: Event) -> None:
        nonlocal at_s
        for event in events:
            at_s += seconds
            lines.append(dataclasses.replace(event, time=at_s, attempt=attempt, task="worker:0").to_json())

    def begin(step: int) -> None:
        run.write_json(run.attempt_plan(attempt), {"mode": "train", "chief": "worker:0", "tasks": []})
        start = TrainingStarted(
            strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=32, epochs=3,
            first_epoch=step // STEPS, first_step=step, steps_per_epoch=STEPS, parameters=1,
            optimizer=optimizer,
        )  # fmt: skip
        add(0, AttemptStarted(waited_s=0.0), TaskStarted(host="a", pid=1), start)

    def end(status: str, number: int) -> None:
        add(0, RunEnded(status=status, step=number * STEPS, epochs_done=number, seconds=1.0))

    begin(0)
    for number, loss in enumerate(losses, 1):
        logs = {"val_loss": loss, **({"val_accuracy": accuracy[number - 1]} if accuracy else {})}
        step = number * STEPS
        add(EPOCH_S, StepsDone(epoch=number - 1, step=step, step_in_epoch=STEPS, steps=STEPS, seconds=10.0, logs={}))
        add(0, EpochEnded(epoch=number - 1, step=step, seconds=EPOCH_S, logs=logs))
        if number == 1 and pause_s:
            end("stopped", 1)
            attempt = 1
            at_s += pause_s
            begin(STEPS)
    if losses:
        timed = StepsTimed(
            steps=STEPS,
            seconds=10.0,
            examples=3200.0,
            input_s=0.0,
            step_median_s=1.0,
            step_p99_s=1.0,
            cpu_s=1.0,
            cores=2,
        )
        add(0, timed)
        end(status, len(losses))
    run.events.write_text("\n".join(lines) + "\n")
    return run


def write_script(name: str) -> RunDir:
    """Write a run of a script that has ended."""
    run = RunDir(Path("runs") / name)
    run.path.mkdir(parents=True)
    run.write_json(run.plan, {"mode": "run", "tasks": []})
    run.write_json(run.attempt_plan(0), {"mode": "run", "tasks": []})
    ended = RunEnded(time=STARTED, task="launcher", status="done", step=0, epochs_done=0, seconds=60.0)
    run.events.write_text(ended.to_json() + "\n")
    return run
