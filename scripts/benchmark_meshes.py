"""Times a training step on meshes of 8 virtual CPU devices, relative to a loop that a user writes by hand.

    python scripts/benchmark_meshes.py [--rows NAME,...] [--rounds 7] [--quick]

Each row is measured in a separate process, which first compiles both programs and then trains them in turn, round by
round, so that a busy machine slows both equally. The ratio is the median over the rounds, with its range.

* DTensor: the sentiment classifier on its three meshes, relative to the loop of TensorFlow's tutorial "Distributed
  training with DTensors". The loop splits and packs each batch in Python, makes one step per call, and shows progress.
* JAX: relative to the loop of the Keras guide "Multi-GPU distributed training with JAX", with the metrics of `fit` in
  its step. The loop puts each batch on the devices, and calls one jitted step with donated state.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROWS = ("sentiment", "sentiment_model_parallel", "sentiment_spatial_parallel", "mnist_mlp_jax", "convnet_jax")
CONFIGS = Path(__file__).parents[1] / "configs"
STEPS, QUICK_STEPS = 100, 4
DEADLINE_S = 1200

Epoch = Callable[[], None]  # trains so many steps


def measure(name: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of both programs, one number per round."""
    import yaml

    from distlaunch.config.backend import choose_backend
    from distlaunch.config.run import RunConfig

    raw = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    raw.update(resume="never", export=[])
    config = RunConfig.model_validate(raw)
    choose_backend(config.strategy.backend)
    session = _session(config)
    own = _distlaunch(session, steps)
    section = config.strategy
    other = _dtensor_loop(session, section, steps) if section.kind == "dtensor" else _jax_loop(session, steps)
    contenders = {"distlaunch": own, "by hand": other}
    seconds: dict[str, list[float]] = {key: [] for key in contenders}
    for epoch in contenders.values():
        epoch()  # compiles
    for _ in range(rounds):
        for key, epoch in contenders.items():
            began = time.perf_counter()
            epoch()
            seconds[key].append((time.perf_counter() - began) / steps)
    return seconds


def _session(config: Any) -> Any:
    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.training.session import Session

    folder = tempfile.mkdtemp(prefix="distlaunch-")
    return Session.build(config, RunDir(folder), Task("worker", 0), Process(lambda event: None, lambda: False))


def _distlaunch(session: Any, steps: int) -> Epoch:
    from distlaunch.strategies.coordination import Vote

    if session.config.strategy.kind == "dtensor":
        from distlaunch.strategies.dtensor import program

        program.STEPS_BEFORE_BLOCKS = 1  # measures what is reached after a while
    session.program.set_train_data(session.train.training_source(0, 0, ends_visible=False))
    return lambda: _ignore(session.program.run_steps(steps, Vote()))


def _ignore(value: Any) -> None: ...


def _batches(session: Any) -> Any:
    """Return the same batches as in both tutorials: shuffled, batched, preprocessed, and not read ahead."""
    source = session.train.training_source(0, 0, ends_visible=False)
    return map(source.load, source.elements) if source.on_host else iter(source.elements.map(source.load))


def _dtensor_loop(session: Any, section: Any, steps: int) -> Epoch:
    import keras
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    mesh = session.strategy.mesh

    def layout(*axes: str | None) -> Any:
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], mesh)

    rules = section.layout
    first, second = rules.get("dense1/weight", [None, None]), rules.get("dense2/weight", [None, None])

    def variable(value: Any, *axes: str | None) -> Any:
        return dtensor.DVariable(_cut(tf.constant(value), layout(*axes)))

    train_step = _dtensor_step([variable(v.numpy(), *a) for v, a in _weights_and_axes(first, second)])
    batches = _batches(session)
    inputs, labels = layout(*(section.input_layout or ["batch", None])), layout("batch")

    def epoch() -> None:
        progress = keras.utils.Progbar(steps, verbose=1)
        with open(os.devnull, "w") as nowhere:
            sys.stdout, before = nowhere, sys.stdout
            try:
                for number in range(steps):
                    x, y = next(batches)
                    metrics = train_step(_cut(x, inputs), _cut(y, labels), 1e-4)
                    progress.update(number, values=metrics.items(), finalize=False)
            finally:
                sys.stdout = before

    return epoch


def _cut(x: Any, where: Any) -> Any:
    """Return the part of a host tensor for each device of a layout, by nested splits."""
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    parts, axes = x, []
    for dimension, axis in enumerate(where.sharding_specs):
        if axis != dtensor.UNSHARDED:
            split = functools.partial(tf.split, num_or_size_splits=where.mesh.dim_size(axis), axis=dimension)
            parts = tf.nest.map_structure(split, parts)
            axes.append(axis)
    components = []
    for place in where.mesh.local_device_locations():
        part = parts
        for axis in axes:
            part = part[place[axis]]
        components.append(part)
    return dtensor.pack(components, where)


def _dtensor_step(w: Sequence[Any]) -> Any:
    """The tutorial's training step, on the weights and biases of both layers."""
    import tensorflow as tf

    @tf.function
    def train_step(x: Any, y: Any, rate: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, w[0]) + w[1])
            mean, variance = tf.nn.moments(hidden, axes=[0])
            hidden = tf.nn.batch_normalization(hidden, mean, variance, 0.0, 1.0, 1e-5)
            logits = tf.matmul(hidden, w[2]) + w[3]
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=y))
        for each, gradient in zip(w, tape.gradient(loss, w), strict=True):
            each.assign_sub(rate * gradient)
        right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int64) == y, tf.float32)
        return {"loss": loss / x.shape[0], "accuracy": tf.reduce_sum(right) / x.shape[0]}

    return train_step


def _weights_and_axes(first: Any, second: Any) -> list[tuple[Any, Any]]:
    from distlaunch.workloads.sentiment import mlp

    module: Any = mlp()
    return [
        (module.dense1.weight, first),
        (module.dense1.bias, first[1:]),
        (module.dense2.weight, second),
        (module.dense2.bias, second[1:]),
    ]


def _jax_loop(session: Any, steps: int) -> Epoch:
    import jax
    import keras
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = session.strategy.mesh
    model = session.trained_model()
    optimizer: Any = model.optimizer
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    mean_loss = keras.metrics.Mean()
    loss_of_batch = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric_variables = [*mean_loss.variables, *accuracy.variables]

    def loss_of(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        predictions, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of_batch(y, predictions), (predictions, others)

    gradient_of = jax.value_and_grad(loss_of, has_aux=True)

    def train_step(state: Any, x: Any, y: Any) -> Any:
        trainable, others, slots, metrics = state
        (loss, (predictions, others)), gradients = gradient_of(trainable, others, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        number = len(mean_loss.variables)
        of_loss = mean_loss.stateless_update_state(metrics[:number], loss, sample_weight=x.shape[0])
        of_accuracy = accuracy.stateless_update_state(metrics[number:], y, predictions)
        return trainable, others, slots, [*of_loss, *of_accuracy]

    step = jax.jit(train_step, donate_argnums=0)
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    layouts = {v.path: v.value.sharding for v in session.model.variables}
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables, metric_variables)
    state = tuple([jax.device_put(np.asarray(v.value), layouts.get(v.path, whole)) for v in group] for group in groups)
    batches = _batches(session)

    def epoch() -> None:
        nonlocal state
        for number in range(steps):
            x, y = next(batches)
            x, y = (jax.device_put(np.asarray(part), rows) for part in (x, y))
            state = step(state, x, y)
            if number % 2:  # with more steps in flight, JAX's collectives between CPU devices were seen to hang
                jax.block_until_ready(state)
        jax.block_until_ready(state)

    return epoch


def run_row(name: str, steps: int, rounds: int) -> str:
    command = [sys.executable, __file__, "--measure", name, str(steps), str(rounds)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        sys.exit(f"{name}:\n{done.stderr[-3000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])
    ratios = [own / other for own, other in zip(seconds["distlaunch"], seconds["by hand"], strict=True)]
    own, other = (statistics.median(seconds[key]) * 1000 for key in ("distlaunch", "by hand"))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"{name:<30}{own:>14.2f}{other:>14.2f}{ratio:>26}"


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a few steps, one round: does it run at all?")
    options = parser.parse_args()
    print(f"{'':<30}{'distlaunch ms':>14}{'by hand ms':>14}{'distlaunch / by hand':>26}", flush=True)
    for name in options.rows.split(","):
        if name not in ROWS:
            parser.error(f"unknown row {name}; rows are {', '.join(ROWS)}")
        print(
            run_row(name, QUICK_STEPS if options.quick else STEPS, 1 if options.quick else options.rounds), flush=True
        )


if __name__ == "__main__":
    main()
