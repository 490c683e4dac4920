"""A process of a contender of `benchmark_peers.py`: trains an epoch for each line of its input."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from typing import Any

from benchmark_task import Epoch, Row, config_of, distlaunch_epoch, examples, fit_epoch, loop_epoch, tutorial_step


def ddp_epoch(row: Row) -> Epoch:
    """Return a function that trains two epochs by PyTorch's DistributedDataParallel, and times the second.

    The models are those of `distlaunch.workloads.images`, the loop is that of PyTorch's own tutorial on DDP.
    """
    torch: Any = importlib.import_module("torch")  # an extra
    distributed, nn = importlib.import_module("torch.distributed"), importlib.import_module("torch.nn")

    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    x, y = examples(row.batch * row.steps)["train"]
    images, labels = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y)
    model = torch.nn.parallel.DistributedDataParallel(_torch_model(nn, row.model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7)
    loss_of = nn.CrossEntropyLoss()
    own = row.batch // world
    generator = torch.Generator().manual_seed(1)  # the same order in both processes

    def one_epoch() -> float:
        began, total, correct = time.perf_counter(), 0.0, 0
        order = torch.randperm(len(images), generator=generator)
        for step in range(row.steps):
            rows = order[step * row.batch + rank * own :][:own]
            optimizer.zero_grad()
            predictions, expected = model(images[rows]), labels[rows]
            loss = loss_of(predictions, expected)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            correct += (predictions.argmax(1) == expected).sum()
        _ = float(total), int(correct)
        return time.perf_counter() - began

    return lambda: (one_epoch(), one_epoch())[1]


def _torch_model(nn: Any, name: str) -> Any:
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def schedule_epoch(_: Any, strategy: Any, row: Row) -> Epoch:
    """Return a function that trains two epochs by TensorFlow's tutorial on parameter servers, and times the second.

    The coordinator schedules a call of a tf.function for each step; a worker takes its batch from a dataset of its own.
    """
    import keras
    import tensorflow as tf

    from distlaunch.workloads import images

    with strategy.scope():
        native: Any = tf.distribute.get_strategy()
        model = getattr(images, row.model)()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        # two sums, as a metric has, and not Keras's metric, which was not tried on parameter servers here
        counts = [tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM) for _ in range(2)]
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    coordinator = tf.distribute.coordinator.ClusterCoordinator(native)

    def dataset_of(_: Any) -> tf.data.Dataset:
        x, y = examples(row.batch * row.steps)["train"]
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(row.batch).prefetch(2)

    @tf.function
    def dataset_on_worker() -> Any:
        return native.distribute_datasets_from_function(dataset_of)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_on_worker))

    def train_step(inputs: Any) -> tf.Tensor:
        loss, predictions = tutorial_step(model, optimizer, per_example, row.batch, inputs)
        correct = tf.cast(tf.argmax(predictions, 1) == inputs[1], tf.float32)
        counts[0].assign_add(tf.reduce_sum(correct))
        counts[1].assign_add(float(row.batch))
        return loss

    @tf.function
    def worker_step(its_iterator: Any) -> tf.Tensor:
        return native.reduce(tf.distribute.ReduceOp.SUM, native.run(train_step, args=(next(its_iterator),)), axis=None)

    def one_epoch() -> float:
        began = time.perf_counter()
        for count in counts:
            count.assign(0.0)
        losses = [coordinator.schedule(worker_step, args=(iterator,)) for _ in range(row.steps)]
        coordinator.join()
        _ = float(losses[-1].fetch()), float(counts[0] / counts[1])
        return time.perf_counter() - began

    return lambda: (one_epoch(), one_epoch())[1]


def serve(row: Row, name: str) -> None:
    """Serve the coordinator of a contender until this process is killed."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if name != "distlaunch":
        server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id)
        server.join()
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.config.run import RunConfig
    from distlaunch.training import server as of_distlaunch

    task = Task(str(resolver.task_type), int(resolver.task_id))
    config, never = RunConfig.model_validate(config_of(row)), threading.Event()
    of_distlaunch.serve(config, RunDir("unused"), task, never, lambda: None, lambda _: None, wait_for_chief=False)


def _tensorflow_epoch(row: Row, name: str) -> Epoch:
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create

    config = RunConfig.model_validate(config_of(row))
    strategy = create(config)
    kind, _, number = name.partition(" ")
    makers = {
        "distlaunch": distlaunch_epoch,
        "loop": loop_epoch,
        "repeat": functools.partial(loop_epoch, repeat=True),
        "schedule": schedule_epoch,
        "fit": functools.partial(fit_epoch, steps_per_execution=int(number or 1)),
    }
    return makers[kind](config, strategy, row)


def main() -> None:
    work = json.loads(sys.argv[1])
    row, name = Row(**work["row"]), work["contender"]
    if row.strategy == "parameter_server" and json.loads(os.environ["TF_CONFIG"])["task"]["type"] != "chief":
        serve(row, name)
    epoch = ddp_epoch(row) if name == "ddp" else _tensorflow_epoch(row, name)
    print("SECONDS", epoch(), flush=True)  # compiles
    for _ in sys.stdin:
        print("SECONDS", epoch(), flush=True)
    os._exit(0)  # the frameworks' own shutdown can wait for peers that are gone


if __name__ == "__main__":
    main()
