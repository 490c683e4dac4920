"""A process of `benchmark.py`: trains the contenders in turn and writes what it measured to a file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONTENDERS = ("fit", "loop", "repeat", "distlaunch")
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"kind": "one_device"},
    "mirrored": {"kind": "mirrored", "replicas": 2},
    "multi_worker_mirrored": {"kind": "multi_worker_mirrored"},
    "parameter_server": {"kind": "parameter_server"},
}
CLUSTERS: dict[str, dict[str, int]] = {
    "multi_worker_mirrored": {"workers": 2},
    "parameter_server": {"workers": 2, "ps": 1},
}
CROSS_ENTROPY = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}


@dataclass(frozen=True)
class Row:
    """One row of the table, and the settings of its processes."""

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
    """The seconds per step of each contender, one number per round, or the reason why it does not run."""

    seconds: dict[str, list[float]]
    failures: dict[str, str]


Epoch = Callable[[], float]  # trains two epochs; returns the seconds of the second


def measure(row: Row) -> Result:
    """Measure a row; this runs in each of its processes, in the same order."""
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create

    config = RunConfig.model_validate(config_of(row))
    strategy = create(config)
    repeat = functools.partial(loop_epoch, repeat=True)
    makers = {"fit": fit_epoch, "loop": loop_epoch, "repeat": repeat, "distlaunch": distlaunch_epoch}
    running: dict[str, Epoch] = {}
    result = Result({}, {})
    for name in CONTENDERS:
        try:
            running[name] = makers[name](config, strategy, row)
            running[name]()  # compiles
        except Exception as error:  # an exception of a contender is its result
            running.pop(name, None)
            result.failures[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    for _ in range(row.rounds):
        for name, epoch in running.items():
            result.seconds.setdefault(name, []).append(epoch() / row.steps)
    strategy.from_chief(b"done")  # no process ends before the others are done
    return result


def config_of(row: Row) -> dict[str, Any]:
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
        "cluster": CLUSTERS.get(row.strategy, {}),
    }


def examples(number: int) -> dict[str, Any]:
    """Return a number of training examples: the shipped subset of Fashion-MNIST, repeated as needed."""
    # without Keras, since a process of PyTorch calls this too
    from distlaunch.workloads.datasets import find_fashion_mnist

    arrays, _ = find_fashion_mnist("shipped", None)
    indices = np.arange(number) % len(arrays["x_train"])
    images = arrays["x_train"][indices, :, :, None].astype(np.float32) / np.float32(255)
    return {"train": (images, arrays["y_train"][indices].astype(np.int64))}


def fit_epoch(_: Any, strategy: Any, row: Row, *, steps_per_execution: int = 1) -> Epoch:
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
        model.compile(
            optimizer=keras.optimizers.Adam(), loss=loss, metrics=["accuracy"], jit_compile=False,
            steps_per_execution=steps_per_execution,
        )  # fmt: skip

    def epoch() -> float:
        model.fit(x, y, batch_size=row.batch, epochs=2, callbacks=[watch], verbose=0)
        return took[1]

    return epoch


def tutorial_step(model: Any, optimizer: Any, per_example: Any, batch: int, inputs: Any) -> tuple[Any, Any]:
    """Update the weights in a replica as TensorFlow's tutorials do, and return the loss and the predictions.

    Args:
        per_example: returns the loss of each example.
        batch: global batch size.
        inputs: features and labels of the replica.
    """
    import tensorflow as tf

    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = tf.nn.compute_average_loss(per_example(labels, predictions), global_batch_size=batch)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, predictions


def loop_epoch(_: Any, strategy: Any, row: Row, *, repeat: bool = False) -> Epoch:
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
    distributed = native.experimental_distribute_dataset(dataset.repeat() if repeat else dataset)
    endless = iter(distributed) if repeat else None

    def train_step(inputs: Any) -> tf.Tensor:
        loss, predictions = tutorial_step(model, optimizer, per_example, row.batch, inputs)
        accuracy.update_state(inputs[1], predictions)
        return loss

    @tf.function
    def distributed_step(inputs: Any) -> tf.Tensor:
        return native.reduce(tf.distribute.ReduceOp.SUM, native.run(train_step, args=(inputs,)), axis=None)

    def one_epoch() -> float:
        began, total = time.perf_counter(), 0.0
        accuracy.reset_state()
        for inputs in distributed if endless is None else itertools.islice(endless, row.steps):
            total += distributed_step(inputs)
        _ = float(total), float(accuracy.result())  # the tutorial prints them
        return time.perf_counter() - began

    return lambda: (one_epoch(), one_epoch())[1]


def distlaunch_epoch(config: Any, strategy: Any, row: Row) -> Epoch:
    from distlaunch.base.events import EpochEnded, Event
    from distlaunch.checkpoints.meta import Progress
    from distlaunch.checkpoints.store import CheckpointStore
    from distlaunch.data.source import make_split
    from distlaunch.data.splits import read_splits
    from distlaunch.training.build import build_model
    from distlaunch.training.loop import LoopHooks, TrainingLoop
    from distlaunch.training.steps.functions import make_steps

    train = make_split(read_splits(config.data).train, config.data, seed=0, training=True)
    model = build_model(config, strategy, train.first_rows(2))
    program = strategy.program(make_steps(config, model))

    def epoch() -> float:
        took: list[float] = []

        def emit(event: Event) -> None:
            if isinstance(event, EpochEnded):
                took.append(event.seconds)

        store = CheckpointStore(Path("unused"))  # only a chief writes
        hooks = LoopHooks(emit, lambda: False, store=store, is_chief=False, clock=time.perf_counter)
        TrainingLoop(config, model, program, train, None, [], hooks).run(Progress())
        return took[1]

    return epoch


def main() -> None:
    work = json.loads(sys.argv[1])
    result = measure(Row(**work["row"]))
    Path(work["file"]).write_text(json.dumps(dataclasses.asdict(result)))
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's own shutdown can wait for peers that are gone


if __name__ == "__main__":
    main()
