"""Measures the time from a kill to the first step of the next attempt, relative to a cold start of the same job.

    python scripts/benchmark_recovery.py [--strategy multi_worker_mirrored] [--workers 2] [--rounds 10]

A cold start has a fresh process for each task: it imports the framework, builds the model and compiles it. A recovery
notices the loss, stops the others, forks the tasks, builds, compiles and reads the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, RunEnded, StepsDone, TaskFailed, TaskStarted
from distlaunch.base.run_dir import RunDir

DEADLINE_S = 300


def config(strategy: str, workers: int) -> dict:
    several = workers if strategy in ("multi_worker_mirrored", "parameter_server") else 1
    return {
        "name": "recovery",
        "model": {"function": "distlaunch.workloads.images:cnn"},
        "data": {
            "function": "distlaunch.workloads.images:fashion_mnist",
            "args": {"source": "shipped"},
            "global_batch": 64,
        },
        "compile": {
            "optimizer": "adam",
            "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
        },
        "train": {"epochs": 3, "log_every_steps": 1},
        "validation": None,
        "strategy": {"kind": strategy},
        "cluster": {"workers": several, "ps": 1 if strategy == "parameter_server" else 0},
        "checkpoint": {"every_steps": 20},
        "restarts": {"max": 1},
    }


@dataclass(frozen=True)
class Round:
    """Times of one job, in seconds.

    Attributes:
        settled: from the kill until the attempt was given up and all of its tasks had ended.
        cold: from the command until the first step was done, for a job with fresh processes.
        start_up, up: from the command, and from the kill, until all tasks had loaded their framework.
        start, recovery: from the command, and from the kill, until the first step was done.
    """

    victim: str
    settled: float
    cold: float
    start_up: float
    up: float
    start: float
    recovery: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="multi_worker_mirrored")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    job, rounds = config(arguments.strategy, arguments.workers), []
    names = [field.name for field in fields(Round)][1:]
    print(f"{'killed':12}" + "".join(f"{name:>10}" for name in names))
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            rounds.append(measure(Path(folder), job, cold_start(Path(other), job)))
        print(f"{rounds[-1].victim:12}" + "".join(f"{getattr(rounds[-1], name):10.2f}" for name in names))
    median = {name: statistics.median(getattr(one, name) for one in rounds) for name in names}
    print(f"{'median':12}" + "".join(f"{median[name]:10.2f}" for name in names))
    worst = max(one.recovery for one in rounds)
    print(f"recovery / cold start: {median['recovery'] / median['cold']:.2f}, at worst {worst / median['cold']:.2f}")


def cold_start(folder: Path, job: dict) -> float:
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, "engine": {"warm_start": False}}))
    began = time.time()
    process = subprocess.Popen([sys.executable, "-m", "distlaunch", "train", "job.yaml", "--quiet"], cwd=folder)
    run = RunDir(folder / "runs" / "recovery")
    try:
        wait_for(lambda: bool(steps(run, 0)), process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return steps(run, 0)[0].time - began


def measure(folder: Path, job: dict, cold: float) -> Round:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    began = time.time()
    command = [sys.executable, "-m", "distlaunch", "train", "job.yaml", "--quiet"]
    process = subprocess.Popen(command, cwd=folder)
    run = RunDir(folder / "runs" / "recovery")
    try:
        wait_for(lambda: any(event.step >= 50 for event in steps(run, 0)), process)
        # the last task: of parameter servers the chief, else the last worker
        victim = max(started(run, 0), key=lambda event: (event.task.startswith("chief"), event.task))
        time.sleep(random.random() * 0.1)  # anywhere between two steps, or within one
        killed = time.time()
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: bool(steps(run, 1)), process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    lost = next(event for event in read_events(run.events) if isinstance(event, TaskFailed | RunEnded))
    first = {attempt: steps(run, attempt)[0].time for attempt in (0, 1)}
    up = {attempt: max(event.time for event in started(run, attempt)) for attempt in (0, 1)}
    starts = up[0] - began, up[1] - killed, first[0] - began, first[1] - killed
    return Round(victim.task, lost.time - killed, cold, *starts)


def steps(run: RunDir, attempt: int) -> list[StepsDone]:
    return [event for event in events(run) if isinstance(event, StepsDone) and event.attempt == attempt]


def started(run: RunDir, attempt: int) -> list[TaskStarted]:
    files = [run.events, *(task.events for task in run.tasks(attempt).values())]
    found = [event for path in files if path.exists() for event in read_events(path)]
    return [event for event in found if isinstance(event, TaskStarted) and event.attempt == attempt]


def events(run: RunDir) -> list[Event]:
    return list(read_events(run.events)) if run.events.exists() else []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit("the job ended, or took too long, before it could be measured")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
