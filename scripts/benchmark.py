"""Times a training step of Keras `fit`, of the tutorial's own loop and of distlaunch, side by side on the same cores.

    python scripts/benchmark.py [--models mlp,cnn] [--strategies mirrored] [--rounds 5] [--json FILE] [--quick]

One set of processes measures one row of the table. It first compiles all contenders, and then trains them in turn,
round by round, so that a busy machine slows all of them equally. A round has two epochs, of which the second is
measured. Times are specific to a machine. Ratios are more general; check their range before you rely on them.

All contenders use the same model, Adam, loss, accuracy metric and global batch, and a new order of examples in each
epoch:
* `fit`: `model.fit` on the arrays;
* `loop`: TensorFlow's tutorial "Custom training with tf.distribute.Strategy": a tf.function for one step, called once
  for each batch of a dataset from `experimental_distribute_dataset`;
* `repeat`: the same loop over `dataset.repeat()`, which counts its steps, so that several workers need not agree before
  each step whether the data has ended;
* `distlaunch`: the strategy, input, program and loop that `distlaunch train` uses, with its default options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_task import CONTENDERS, STRATEGIES, Result, Row

from distlaunch.cluster.ports import REUSE_ENV, pick_ports

BATCHES = {"mlp": (128,), "cnn": (128, 64)}
STEPS = {"mlp": 64, "cnn": 16}  # of one epoch
QUICK_STEPS = 4
DEADLINE_S = 1200
OTHERS = CONTENDERS[:-1]
TASK = Path(__file__).with_name("benchmark_task.py")


def run_row(row: Row) -> Result:
    """Start the processes of a row, wait for them, and return the measurements of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_row(row, Path(folder))


def _run_row(row: Row, folder: Path) -> Result:
    number = 2 if row.strategy == "multi_worker_mirrored" else 1
    held = pick_ports(number) if number > 1 else None
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    processes, logs = [], [folder / f"{index}.log" for index in range(number)]
    for index, path in enumerate(logs):
        if held is not None:
            cluster = {"worker": [f"127.0.0.1:{port}" for port in held.numbers]}
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            environment.update(REUSE_ENV, TF_CONFIG=json.dumps(config))
        work = json.dumps({"row": dataclasses.asdict(row), "file": str(folder / f"{index}.json")})
        with path.open("w") as log:
            command = [sys.executable, str(TASK), work]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        if held is not None:
            held.release()
    if codes != [0] * number:
        tails = [path.read_text()[-3000:] for path in logs]
        sys.exit("\n".join(f"{row.title}: exit code {c}\n{tail}" for c, tail in zip(codes, tails, strict=True)))
    return Result(**json.loads((folder / "0.json").read_text()))


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes when all have ended, one has failed or time is up; None for processes that still run."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.1)


def describe(row: Row, result: Result) -> str:
    """Return the line of a row, and a line for each contender that does not run."""
    cells = [_milliseconds(result, name) for name in CONTENDERS] + [_ratio(result, name) for name in OTHERS]
    return "\n".join([_line(row.title, cells), *(f"    {name} fails: {why}" for name, why in result.failures.items())])


def header() -> str:
    names = [f"{name} ms" for name in CONTENDERS] + [f"{name}/{CONTENDERS[-1]}" for name in OTHERS]
    return _line("", names)


def _line(title: str, cells: list[str]) -> str:
    widths = [14] * len(CONTENDERS) + [22] * len(OTHERS)
    return f"{title:<34}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _milliseconds(result: Result, name: str) -> str:
    return "fails" if name in result.failures else f"{statistics.median(result.seconds[name]) * 1000:.2f}"


def _ratio(result: Result, name: str) -> str:
    """Return how many times faster distlaunch was: the median over the rounds, and the range."""
    if name in result.failures or "distlaunch" in result.failures:
        return "-"
    pairs = zip(result.seconds[name], result.seconds["distlaunch"], strict=True)
    ratios = [other / own for other, own in pairs]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(BATCHES), help=f"of {', '.join(BATCHES)}")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds a step")
    parser.add_argument("--quick", action="store_true", help="a few steps, one round: does it run at all?")
    options = parser.parse_args()
    models, strategies = options.models.split(","), options.strategies.split(",")
    unknown = [name for name in models if name not in BATCHES] + [name for name in strategies if name not in STRATEGIES]
    if unknown or options.rounds < 1:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "--rounds must be at least 1")
    rounds = 1 if options.quick else options.rounds
    records = []
    print(header(), flush=True)
    for model in models:
        for batch in BATCHES[model]:
            for strategy in strategies:
                row = Row(model, batch, strategy, QUICK_STEPS if options.quick else STEPS[model], rounds)
                result = run_row(row)
                print(describe(row, result), flush=True)
                records.append({**dataclasses.asdict(row), **dataclasses.asdict(result)})
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    if any("distlaunch" in record["failures"] for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
