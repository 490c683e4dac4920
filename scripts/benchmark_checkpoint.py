"""Measures what checkpoints cost during training, as ratios of times that one process measures in one run.

    python scripts/benchmark_checkpoint.py [--megabytes 1000] [--strategies one_device,jax] [--saves 5]

    stall    the time for which training pauses for a checkpoint, relative to a plain copy of the same arrays
    steps    the time of a step while a checkpoint is written, relative to a step while nothing is written

The state is mainly an embedding that steps hardly use, so steps are short and the copy determines the cost. The
program's clock shows ten minutes between two checkpoints.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, ROWS, BATCH = 256, 64, 64
STALL_LIMIT, STEP_LIMIT = 1.5, 1.1
STRATEGIES = {
    "one_device": {"kind": "one_device"},
    "mirrored": {"kind": "mirrored", "replicas": 1},
    "dtensor": {"kind": "dtensor", "mesh": {"batch": 1}},
    "jax": {"kind": "jax", "mesh": {"batch": 1}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=["one_device", "jax"])
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        print(json.dumps(measure(words.one, words.megabytes, words.saves)))
        return
    print(f"{'strategy':<12} {'state':>8} {'copy':>8} {'stall':>8} {'ratio':>6}   {'step':>9} {'while writing':>13}")
    too_slow = False
    for name in words.strategies:
        command = [sys.executable, __file__, "--one", name, f"--megabytes={words.megabytes}", f"--saves={words.saves}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        stall, step = found["stall_ratio"], found["step_ratio"]
        too_slow = too_slow or stall > STALL_LIMIT or step > STEP_LIMIT
        print(
            f"{name:<12} {found['megabytes']:>5} MB {found['copy_s']:>6.2f} s {found['stall_s']:>6.2f} s {stall:>6.2f}"
            f"   {found['step_s'] * 1e3:>6.2f} ms {step:>13.2f}",
            flush=True,
        )
    sys.exit(too_slow)


def model(megabytes: int) -> Any:
    """Return a model with a frozen table, which makes up its state, and a few dense layers, which make up its step."""
    import keras

    layers = keras.layers
    inputs = layers.Input((WIDTH,))
    table = layers.Embedding(megabytes * 1_000_000 // (4 * WIDTH), WIDTH, trainable=False, name="table")
    first = table(keras.ops.cast(inputs[:, :1] * 0, "int32"))[:, 0]
    x = inputs + 0 * first
    for _ in range(3):
        x = layers.Dense(WIDTH, "relu")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def data() -> dict[str, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS * BATCH, WIDTH)).astype("float32")
    return {"train": (x, x[:, :1])}


def measure(name: str, megabytes: int, saves: int) -> dict[str, float]:
    """Seconds of a copy, a stall and a step, and the ratios of stalls and of steps while one is written; medians."""
    from distlaunch.config.backend import choose_backend

    choose_backend("jax" if name == "jax" else "tensorflow")
    from distlaunch.base.events import CheckpointSaved, Event
    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.training.session import Session

    config = _config(name, megabytes)
    stalls: list[float] = []

    def emit(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.stalled_s is not None:
            stalls.append(event.stalled_s)

    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=os.environ.get("BENCHMARK_DIR")) as folder:
        session = Session.build(config, RunDir(folder), Task("worker", 0), Process(emit, lambda: False))
        size, copies, steps, ratios = _save_often(session, config, emit, saves)
    return {
        "megabytes": round(size / 1e6),
        "copy_s": statistics.median(copies),
        "stall_s": statistics.median(stalls),
        "stall_ratio": statistics.median(stall / copy for stall, copy in zip(stalls, copies, strict=True)),
        "step_s": statistics.mean(steps),
        "step_ratio": statistics.median(ratios),
    }


def _config(name: str, megabytes: int) -> Any:
    from distlaunch.config.run import RunConfig

    here = Path(__file__).stem
    sys.path.insert(0, str(Path(__file__).parent))
    return RunConfig.model_validate(
        {
            "model": {"function": f"{here}:model", "args": {"megabytes": megabytes}},
            "data": {"function": f"{here}:data", "global_batch": BATCH},
            "compile": {"optimizer": "adam", "loss": "mse"},
            "strategy": STRATEGIES[name],
            "checkpoint": {"keep": 1},
        }
    )


def _save_often(
    session: Any, config: Any, emit: Callable[[Any], None], saves: int
) -> tuple[int, list[float], list[float], list[float]]:
    """Bytes of the state; seconds of a plain copy for each save, and of the last idle steps; the ratios of steps."""
    from distlaunch.base.process import Process
    from distlaunch.checkpoints.best import BestEpoch
    from distlaunch.checkpoints.meta import Progress
    from distlaunch.checkpoints.policy import SaveDecision
    from distlaunch.checkpoints.saver import Saver
    from distlaunch.strategies.coordination import Vote
    from distlaunch.training.checks.nonfinite import NonFinite

    program, source = session.program, session.train.training_source(0, 0, ends_visible=False)
    program.set_train_data(source)
    session.model.stop_training = False
    between_s = [0.0]
    process = Process(emit, lambda: False, clock=lambda: time.monotonic() + between_s[0])

    def step() -> float:
        began = time.perf_counter()
        program.run_steps(1, Vote())
        return time.perf_counter() - began

    for _ in range(20):
        step()
    ratios, idle, copies = [], [], []
    state = program.snapshot()
    with Saver(config, session.model, [], process, session.store, is_chief=True, best=BestEpoch(None),
               policy=SaveDecision([]), on_nonfinite=NonFinite("fail", emit).state) as saver:  # fmt: skip
        for number in range(saves):
            # the first gets memory that the machine may have to find; what follows gets the same again
            copies.append([_seconds_of_copy(state) for _ in range(2)][-1])
            between_s[0] += 600
            saver.save(program, Progress(step=number + 1))
            writing: list[float] = []
            while not saver.is_idle:
                writing.append(step())
            saver.check()
            idle = [step() for _ in writing]  # as many, at once: other work on the machine comes and goes
            ratios.append(statistics.mean(writing) / statistics.mean(idle))
    return sum(value.nbytes for value in state.values()), copies, idle, ratios


def _seconds_of_copy(state: dict[str, Any]) -> float:
    began = time.perf_counter()
    copy = [value.copy() for value in state.values()]
    seconds = time.perf_counter() - began
    del copy
    return seconds


if __name__ == "__main__":
    main()
