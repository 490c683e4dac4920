"""Measures where the time from the command to the first training steps goes, for the reference MLP.

    python scripts/benchmark_start.py [--rounds 5]

Prints medians and ranges, in seconds since the command was started, of runs that take turns: each kind of strategy, as
fresh processes and forked from a warm process. For comparison, each round also times a Python process that only
imports the frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "configs" / "mnist_mlp.yaml"
DEADLINE_S = 300
STRATEGIES = {
    "one device": ("tensorflow", ["strategy={kind: one_device}"]),
    "two workers": ("tensorflow", ["strategy={kind: multi_worker_mirrored}", "cluster={workers: 2}"]),
    "jax": ("jax", ["strategy={kind: jax, mesh: {batch: 1}}"]),
}
"""The Keras backend and the settings of each strategy."""
MILESTONES = {
    "AttemptStarted": "planned",
    "TaskStarted": "imported",
    "DataResolved": "data read",
    "TrainingStarted": "model built",
    "StepsDone": "first call",
    "RunEnded": "trained",
}
"""Column heading of each event; the first event of its kind counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[list[float]]] = {}
    imports: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (backend, settings) in STRATEGIES.items():
            imports.setdefault(backend, []).append(_import(backend))
            for warm in (False, True):
                row = f"{name}, {'warm' if warm else 'cold'}"
                times.setdefault(row, []).append(_run([*settings, f"engine.warm_start={str(warm).lower()}"]))
    headings = [*MILESTONES.values(), "exit"]
    print(f"{'':20}" + "".join(f"{heading:>21}" for heading in headings))
    for row, found in times.items():
        print(f"{row:20}" + "".join(f"{_summary(column):>21}" for column in zip(*found, strict=True)))
    for backend, seconds in imports.items():
        print(f"{f'only import {backend}':20}{_summary(seconds):>21}")


def _run(settings: list[str]) -> list[float]:
    """Train one epoch, and return when each milestone was reached, in seconds since the command was started."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distlaunch", "train", str(CONFIG), "--name", "run", "--set", "train.epochs=1"]
        began = time.time()
        subprocess.run(
            [*command, *(word for setting in settings for word in ("--set", setting))],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=True,
        )
        ended = time.time()
        reached: dict[str, float] = {}
        for line in (Path(folder) / "runs" / "run" / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            reached.setdefault(event["event"], event["time"])
    return [*(reached[kind] - began for kind in MILESTONES), ended - began]


def _import(backend: str) -> float:
    began = time.time()
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", f"import {backend}, keras"]
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=DEADLINE_S, check=True)
    return time.time() - began


def _summary(seconds: list[float] | tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


if __name__ == "__main__":
    main()
