"""Times a training step of Keras `fit`, of the tutorial's own loop and of distlaunch, side by side on the same cores.

    python scripts/benchmark.py [--models mlp,cnn] [--strategies mirrored] [--rounds 5] [--json FILE] [--quick]

One set of processes measures one row of the table. It compiles all three first, then trains them in turn, round by
round, so that a busy machine slows all alike. Of each round of two epochs the second counts. What is said of one
machine holds for another only as far as the ratios do; look at their range before believing them.

All three use the same model, Adam, loss, accuracy metric, global batch and examples in a new order each epoch:
* `fit`: `model.fit` on the arrays;
* `loop`: TensorFlow's tutorial "Custom training with tf.distribute.Strategy": a tf.function for one step, called once
  for each batch of a dataset from `experimental_distribute_dataset`;
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.cluster.ports import REUSE_ENV, pick_ports
from distlaunch.cluster.spec import Task

BATCHES = {"mlp": (128,), "cnn": (128, 64)}
STEPS = {"mlp": 64, "cnn": 24}  # of one epoch
QUICK_STEPS = 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"kind": "one_device"},
    "mirrored": {"kind": "mirrored", "replicas": 2},
    "multi_worker_mirrored": {"kind": "multi_worker_mirrored"},
}
CONTENDERS = ("fit", "loop", "distlaunch")
DEADLINE_S = 1200
CROSS_ENTROPY = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}


@dataclass(frozen=True)
class Row:
    """One line of the table, and what its processes need to know."""

    model: str
    batch: int
    strategy: str
    steps: int
    rounds: int

    @property
    def title(self) -> str:
        replicas = "" if self.strategy == "one_device" else " x2"
        return f"{self.model} {self.batch}  {self.strategy}{replicas}"


@dataclass(frozen=True)
class Result:
    """Seconds a step, one number a round, of each contender, or why it does not run."""

    seconds: dict[str, list[float]]
    failures: dict[str, str]


# the process that measures

Epoch = Callable[[], float]  # trains two epochs; returns the seconds of the second


def measure(row: Row, task: Task) -> Result:
    """Runs in each process of a row; all of them go through the same sequence."""
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies import create

    config = RunConfig.model_validate(_config(row))
    strategy = create(config.strategy, task)
    makers = {"fit": _fit, "loop": _loop, "distlaunch": _distlaunch}
    running: dict[str, Epoch] = {}
    result = Result({}, {})
    for name in CONTENDERS:
        try:
            running[name] = makers[name](config, strategy, row)
            running[name]()  # compiles
        except Exception as error:  # whatever a contender raises is its result
            running.pop(name, None)
            result.failures[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    for _ in range(row.rounds):
        for name, epoch in running.items():
            result.seconds.setdefault(name, []).append(epoch() / row.steps)
    strategy.from_chief(b"done")  # nobody leaves before the others are done
    return result


def _config(row: Row) -> dict[str, Any]:
    return {
        "model": {"function": f"distlaunch.workloads.images:{row.model}"},
        "data": {
            "function": f"{__file__}:examples",
            "args": {"number": row.batch * row.steps},
            "global_batch": row.batch,
        },
        "compile": {"optimizer": "adam", "loss": CROSS_ENTROPY, "metrics": ["accuracy"]},
        "train": {"epochs": 2},
        "validation": None,
        "checkpoint": {"every_epochs": 1_000_000},
        "strategy": STRATEGIES[row.strategy],
        "cluster": {"workers": 2} if row.strategy == "multi_worker_mirrored" else {},
    }


def examples(number: int) -> dict[str, Any]:
    """So many training examples: the shipped subset of Fashion-MNIST, over and over."""
    from distlaunch.workloads.images import fashion_mnist

    images, labels = fashion_mnist(source="shipped")["train"]
    indices = [index % len(images) for index in range(number)]
    return {"train": (images[indices], labels[indices])}


def _fit(_: Any, strategy: Any, row: Row) -> Epoch:
    import keras

    from distlaunch.workloads import images

    x, y = examples(row.batch * row.steps)["train"]
    began: dict[int, float] = {}
    took: dict[int, float] = {}
    watch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: began.update({epoch: time.perf_counter()}),
        on_epoch_end=lambda epoch, _: took.update({epoch: time.perf_counter() - began[epoch]}),
    )
    with strategy.scope():
        model = getattr(images, row.model)()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(), loss=loss, metrics=["accuracy"], jit_compile=False)

    def epoch() -> float:
        model.fit(x, y, batch_size=row.batch, epochs=2, callbacks=[watch], verbose=0)
        return took[1]

    return epoch


def _loop(_: Any, strategy: Any, row: Row) -> Epoch:
    import keras
    import tensorflow as tf

    from distlaunch.workloads import images

    x, y = examples(row.batch * row.steps)["train"]
    with strategy.scope():
        native = tf.distribute.get_strategy()
        model = getattr(images, row.model)()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(row.batch)
    distributed = native.experimental_distribute_dataset(dataset)

    def train_step(inputs: Any) -> tf.Tensor:
        examples, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(examples, training=True)
            loss = tf.nn.compute_average_loss(per_example(labels, predictions), global_batch_size=row.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def distributed_step(inputs: Any) -> tf.Tensor:
        return native.reduce(tf.distribute.ReduceOp.SUM, native.run(train_step, args=(inputs,)), axis=None)

    def one_epoch() -> float:
        began, total = time.perf_counter(), 0.0
        accuracy.reset_state()
        for inputs in distributed:
            total += distributed_step(inputs)
        float(total), float(accuracy.result())  # the tutorial prints them
        return time.perf_counter() - began

    return lambda: (one_epoch(), one_epoch())[1]


def _distlaunch(config: Any, strategy: Any, row: Row) -> Epoch:
    from distlaunch.events import EpochEnded, Event
    from distlaunch.training.build import build_model
    from distlaunch.training.checkpoint import CheckpointStore, Progress
    from distlaunch.training.data import make_split, read_splits
    from distlaunch.training.loop import Surroundings, TrainingLoop
    from distlaunch.training.steps import make_steps

    train = make_split(read_splits(config.data).train, config.data, seed=0, training=True)
    model = build_model(config, strategy, train.first_rows(2))
    program = strategy.program(make_steps(config, model))

    def epoch() -> float:
        took: list[float] = []

        def emit(event: Event) -> None:
            if isinstance(event, EpochEnded):
                took.append(event.seconds)

        store = CheckpointStore(Path("unused"))  # only a chief writes
        around = Surroundings(emit, lambda: False, store, is_chief=False, clock=time.perf_counter)
        TrainingLoop(config, model, program, train, None, [], around).run(Progress(), None)
        return took[1]

    return epoch


# the process that starts them


def run_row(row: Row) -> Result:
    """Starts the row's processes, waits for them, and returns what the first one measured."""
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
        work = json.dumps({"row": dataclasses.asdict(row), "index": index, "file": str(folder / f"{index}.json")})
        with path.open("w") as log:
            command = [sys.executable, __file__, "--measure", work]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        deadline = time.monotonic() + DEADLINE_S
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        if held is not None:
            held.release()
    if any(codes):
        tails = [path.read_text()[-3000:] for path in logs]
        sys.exit("\n".join(f"{row.title}: exit code {c}\n{tail}" for c, tail in zip(codes, tails, strict=True)))
    return Result(**json.loads((folder / "0.json").read_text()))


def _measure_and_exit(work: dict[str, Any]) -> None:
    result = measure(Row(**work["row"]), Task("worker", work["index"]))
    Path(work["file"]).write_text(json.dumps(dataclasses.asdict(result)))
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's own shutdown can wait for peers that are gone


def describe(row: Row, result: Result) -> str:
    """The row's line, and one more for each contender that does not run."""
    cells = [f"{row.title:<36}"]
    cells += [f"{_milliseconds(result, name):>{width}}" for name, width in zip(CONTENDERS, (12, 12, 14), strict=True)]
    cells += [f"{_ratio(result, name):>22}" for name in ("fit", "loop")]
    return "\n".join(["".join(cells), *(f"    {name} fails: {why}" for name, why in result.failures.items())])


def header() -> str:
    names = ["fit ms", "loop ms", "distlaunch ms", "fit/distlaunch", "loop/distlaunch"]
    return f"{'':<36}" + "".join(f"{n:>{w}}" for n, w in zip(names, (12, 12, 14, 20, 22), strict=True))


def _milliseconds(result: Result, name: str) -> str:
    return "fails" if name in result.failures else f"{statistics.median(result.seconds[name]) * 1000:.2f}"


def _ratio(result: Result, name: str) -> str:
    """Median over the rounds of how many times faster distlaunch was, and the range."""
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
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure_and_exit(options.measure)
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
