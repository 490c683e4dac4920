"""`parameter_server`: workers compute, servers hold the variables, and a coordinator assigns the steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.cores import num_visible_cores
from distlaunch.cluster.ports import pick_ports
from distlaunch.cluster.proxies import direct_paths
from distlaunch.cluster.spec import Task
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.parameter_server import ParameterServerSection
from distlaunch.patches import tensorflow_tables
from distlaunch.patches.keras_branches import BRANCHES
from distlaunch.patches.keras_slots import make_slots_in
from distlaunch.patches.tensorflow_private import schedule_traced_graphs
from distlaunch.strategies.devices import use_one_gpu
from distlaunch.strategies.parameter_server.partition import (
    Shards,
    make_partitioner,
    num_shards,
    shard_bounds,
    show_shards,
    whole_path,
)
from distlaunch.strategies.parameter_server.program import CoordinatorProgram
from distlaunch.strategies.patches.keras_whole_weights import join_split_weights
from distlaunch.strategies.protocol import Steps, Strategy
from distlaunch.strategies.variables import optimizers_of, with_wrapped_optimizers

_in_process: dict[tuple[int, int], Any] = {}
"""Servers in this process, by the numbers of workers and ps. They cannot be stopped, so a second run reuses them."""

_WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "Lamb", "Muon")
"""Optimizers that compute means, norms or products over a whole variable."""


class ParameterServer(Strategy):
    """The coordinator of the strategy `parameter_server`."""

    num_replicas = 1  # one worker runs a step on a whole global batch

    def __init__(self, config: ParameterServerSection, cluster: Cluster) -> None:
        use_one_gpu()
        self._partitioner = None if config.partitioner is None else make_partitioner(config.partitioner)
        resolver = _resolver(cluster)
        self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        schedule_traced_graphs(self._strategy)
        tensorflow_tables.install()
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        servers = resolver.cluster_spec()
        self._num_workers: int = servers.num_tasks("worker")
        self._local_cpu = tf.config.list_logical_devices("CPU")[0].name
        with self._strategy.scope():  # one anchor on each server, to colocate variables with
            self._anchors = [
                tf.Variable(tf.constant(0.0), trainable=False, name=f"ps_{i}") for i in range(servers.num_tasks("ps"))
            ]
        self._load = [0] * len(self._anchors)

    @contextlib.contextmanager
    def _creation_scope(self) -> Iterator[None]:
        with self._strategy.scope(), tf.variable_creator_scope(self._create):
            yield

    def scope(self) -> AbstractContextManager[Any]:
        return self._creation_scope()

    def _create(self, next_creator: Any, **kwargs: Any) -> Any:
        """Create a variable on the server with the least data so far, or split it if the partitioner says so."""
        # slots of optimizers are colocated with their variables
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        initial = kwargs["initial_value"]
        if self._partitioner is None or not kwargs.get("trainable") or not callable(initial):
            return self._place(next_creator, kwargs)
        with tf.init_scope(), tf.device(self._local_cpu):
            # drawn whole and then split, so that the values are those of one device
            drawn: Any = initial()
            whole = tf.convert_to_tensor(drawn, dtype=kwargs.get("dtype"))
        parts = num_shards(self._partitioner, whole.shape, whole.dtype)
        if parts == 1:
            return self._place(next_creator, {**kwargs, "initial_value": lambda: tf.identity(whole)})
        made = []
        num_rows: Any = whole.shape[0]
        for index, (start, stop) in enumerate(shard_bounds(int(num_rows), parts)):
            # copied, so that only this shard's rows are sent to its server
            with tf.init_scope(), tf.device(self._local_cpu):
                rows = tf.identity(whole[start:stop])
            options = {**kwargs, "name": f"{kwargs.get('name') or 'variable'}/part_{index}"}
            made.append(self._place(next_creator, {**options, "initial_value": lambda rows=rows: tf.identity(rows)}))
        return Shards(made)

    def _place(self, next_creator: Any, kwargs: dict[str, Any]) -> Any:
        server = int(np.argmin(self._load))
        variable = next_creator(**{**kwargs, "colocate_with": self._anchors[server]})
        self._load[server] += _num_bytes(variable)
        return variable

    def adopt(self, model: keras.Model) -> None:
        if self._partitioner is not None:
            show_shards(model)
            join_split_weights(model)
        for optimizer in optimizers_of(model):
            if any(whole_path(variable) for variable in model.trainable_variables):
                check_optimizer(optimizer)
            check_branches(optimizer)
            self._check_loss_scale(optimizer)
            for part in with_wrapped_optimizers(optimizer):
                _colocate_slots(part)

    def _check_loss_scale(self, optimizer: Any) -> None:
        if self._num_workers > 1 and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            message = (
                "with float16 the loss is scaled, and several workers cannot share one scale and one count of skipped "
                "steps; use the policy mixed_bfloat16, or one worker"
            )
            raise ConfigError(Problem(("cluster", "workers"), message))

    def program(self, steps: Steps) -> CoordinatorProgram:
        return CoordinatorProgram(self._strategy, self._coordinator, steps, self._num_workers)


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError if an optimizer, or one that it wraps, needs whole variables and cannot work on shards."""
    for part in with_wrapped_optimizers(optimizer):
        name = type(part).__name__
        if getattr(part, "clipnorm", None) is not None:
            message = f"{name}(clipnorm=...) needs the norm of whole variables, but they are split; use global_clipnorm"
        elif isinstance(part, keras.optimizers.MultiOptimizer):
            message = (
                f"{name} chooses an optimizer by the path of a variable, but strategy.partitioner splits variables "
                "into parts with other paths; remove the partitioner"
            )
        elif name in _WHOLE_TENSOR_OPTIMIZERS:
            message = f"{name} needs whole variables, but strategy.partitioner splits them; use another optimizer"
        else:
            continue
        raise ConfigError(Problem(("compile", "optimizer"), message))


def check_branches(optimizer: Any) -> None:
    """Raise ConfigError for options that depend on a count of steps, which each worker would keep separately."""
    for part in with_wrapped_optimizers(optimizer):
        if option := next((name for name in BRANCHES if getattr(part, name, None)), None):
            message = f"{type(part).__name__}({option}=...) is not supported by parameter_server; remove it"
            raise ConfigError(Problem(("compile", "optimizer"), message))


def _colocate_slots(optimizer: Any) -> None:
    """Create an optimizer's slots on the server of their variable, where the update is computed."""

    def colocated_with(variable: Any) -> AbstractContextManager[Any]:
        anchor = getattr(variable, "value", variable)

        def create(next_creator: Any, **options: Any) -> Any:
            return next_creator(**{**options, "colocate_with": anchor})

        return tf.variable_creator_scope(create)

    def name_whole(variable: Any, slot: Any) -> None:
        if (whole := whole_path(variable)) is not None:
            flat, flat_whole = (path.replace("/", "_") for path in (variable.path, whole))
            slot._distlaunch_whole = slot.path.replace(flat, flat_whole, 1)

    make_slots_in(optimizer, colocated_with, name_whole)


def _num_bytes(variable: Any) -> int:
    return int(np.prod(variable.shape)) * variable.dtype.size


def _resolver(cluster: Cluster) -> Any:
    if cluster.hosting == "processes" and "TF_CONFIG" in os.environ:
        return tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    return _in_process_cluster(cluster)


def _in_process_cluster(cluster: Cluster) -> Any:
    """Return a cluster whose workers and ps all run in this process."""
    key = (cluster.num_workers, cluster.ps)
    if key not in _in_process:
        os.environ.update(direct_paths(os.environ))  # a notebook has no launcher that sets these variables
        held = pick_ports(sum(key))
        numbers = held.numbers
        held.release()  # TensorFlow binds the ports itself
        jobs = {"worker": numbers[: cluster.num_workers], "ps": numbers[cluster.num_workers :]}
        spec = tf.train.ClusterSpec({job: [f"127.0.0.1:{port}" for port in ports] for job, ports in jobs.items()})
        for job in spec.jobs:
            for index in range(spec.num_tasks(job)):
                start_server(spec, Task(job, index), num_workers=cluster.num_workers)
        _in_process[key] = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    return _in_process[key]


def start_server(spec: tf.train.ClusterSpec, task: Task, *, num_workers: int = 1) -> Any:
    """Start a TensorFlow server in this process, which serves until the process ends, and return it."""
    options = tf.compat.v1.ConfigProto()
    # Each worker in this process may block a thread while it waits. Without a free thread, the servers would hang.
    # Source: TensorFlow's guide to parameter server training.
    if num_visible_cores() < num_workers + 1:
        options.inter_op_parallelism_threads = num_workers + 1
    return tf.distribute.Server(
        spec, job_name=task.job, task_index=task.index, protocol="grpc", config=options, start=True
    )
