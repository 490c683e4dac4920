"""`multi_worker_mirrored`: several processes in lockstep, gradients summed over all of them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from distlaunch.cluster.spec import Task
from distlaunch.config.strategy import Cluster
from distlaunch.config.strategy import MultiWorkerMirrored as MultiWorkerMirroredConfig
from distlaunch.errors import ConfigError, Problem
from distlaunch.strategies.protocol import Steps, StrategyDefaults
from distlaunch.strategies.replica_program import ReplicaProgram, Replicas

_COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


class MultiWorkerMirrored(StrategyDefaults):
    kind = "multi_worker_mirrored"

    def __init__(self, config: MultiWorkerMirroredConfig, task: Task, cluster: Cluster | None = None) -> None:
        del cluster  # its size is that of the devices, or in TF_CONFIG
        self.task = task
        _check_local_replicas(config.replicas_per_worker)
        options = tf.distribute.experimental.CommunicationOptions(implementation=_COMMUNICATION[config.communication])
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        resolver = self._strategy.cluster_resolver
        self._num_processes = max(1, _num_workers(resolver))
        self._rank = _rank(resolver)
        self.is_chief = self._rank == 0
        self.num_replicas: int = self._strategy.num_replicas_in_sync

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def from_chief(self, message: bytes) -> bytes:
        own = np.frombuffer(message, np.uint8).astype(np.int32) if self.is_chief else np.zeros(0, np.int32)
        length = int(self._sum(np.int32(len(own))))
        text = np.zeros(length, np.int32)
        text[: len(own)] = own
        return self._sum(text).astype(np.uint8).tobytes() if length else b""

    def leave(self) -> None:
        # A task that has its sum may still owe the others parts of theirs, so none may end before all have come here.
        # Worker 0 keeps the keys, so it is the last to go.
        if self._num_processes == 1:
            return
        _announce("here", self._rank)
        for rank in range(self._num_processes):
            _await("here", rank)
        if self._rank > 0:
            with contextlib.suppress(tf.errors.UnavailableError):  # worker 0 read it, and went before it answered
                _announce("gone", self._rank)
            return
        for rank in range(1, self._num_processes):
            _await("gone", rank)

    def _sum(self, value: Any) -> np.ndarray:
        """The sum of one value of each process (of its first replica)."""

        @tf.function
        def total(value: tf.Tensor) -> Any:
            def local() -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                first = context.replica_id_in_sync_group % (self.num_replicas // self._num_processes) == 0
                return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, value, tf.zeros_like(value)))

            return self._strategy.experimental_local_results(self._strategy.run(local))[0]

        return total(tf.constant(value)).numpy()

    def program(self, steps: Steps) -> ReplicaProgram:
        local = self.num_replicas // self._num_processes
        replicas = Replicas(
            total=self.num_replicas,
            local=local,
            first=self._rank * local,
            num_processes=self._num_processes,
            is_chief=self.is_chief,
        )
        return ReplicaProgram(self._strategy, steps, replicas)


def _context() -> Any:
    return context.context()


def _announce(what: str, rank: int) -> None:
    """Sets a key in the coordination service, which TensorFlow keeps on worker 0 beside the strategy."""
    _context().set_config_key_value(f"distlaunch/{what}/{rank}", "1")


def _await(what: str, rank: int) -> None:
    """Waits for a key; in short turns, since signals are handled between them."""
    while True:
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            _context().get_config_key_value(f"distlaunch/{what}/{rank}", 500)
            return


def _num_workers(resolver: Any) -> int:
    jobs = resolver.cluster_spec().as_dict()
    return len(jobs.get("chief", [])) + len(jobs.get("worker", []))


def _rank(resolver: Any) -> int:
    """This process's place: the chief first, then the workers, as TensorFlow counts them."""
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", []))
    return int(resolver.task_id or 0) + (chiefs if resolver.task_type == "worker" else 0)


def _check_local_replicas(wanted: int | str) -> None:
    gpus = len(tf.config.list_physical_devices("GPU"))
    have = max(gpus, 1)
    if wanted != "auto" and wanted != have:
        what = f"{gpus} GPUs, one replica on each" if gpus else "no GPU, and TensorFlow gives it one CPU replica"
        message = f"got {wanted}, but this worker has {what}; write 'auto'"
        raise ConfigError(Problem(("strategy", "replicas_per_worker"), message))
