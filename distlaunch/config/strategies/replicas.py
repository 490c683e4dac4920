"""Strategies with replicas: copies of the model that each compute a part of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from distlaunch.base.errors import Problem
from distlaunch.config.base import Positive
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Key
from distlaunch.config.strategies.base import CPU_DEVICES, StrategySection, TrialSections, counted

_TRIAL_WORKERS = 2
"""Number of processes of a trial on GPUs, if they can share the replicas equally."""


class LocalReplicasSection(StrategySection):
    """The common base of strategies with one process, which has a copy of the model on each of its devices."""

    replicas: Positive | Literal["auto"] = "auto"
    """Number of devices. `auto`: every GPU, or 2 virtual CPU devices if there is none."""

    has_replicas: ClassVar[bool] = True

    def num_devices(self, cluster: Cluster) -> int | None:
        return None if self.replicas == "auto" else self.replicas

    def num_parts(self, cluster: Cluster, num_gpus: int | None) -> int | None:
        if self.replicas != "auto":
            return self.replicas
        return None if num_gpus is None else num_gpus or CPU_DEVICES

    def devices_needed(self, cluster: Cluster) -> tuple[Key, int] | None:
        return None if self.replicas == "auto" else (("strategy", "replicas"), self.replicas)

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        return [_replicas(self.num_parts(cluster, num_gpus))]

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        yield from (({"kind": cls.own_kind(), "replicas": number}, {}) for number in replicas)


class MirroredSection(LocalReplicasSection):
    """Strategy with one process, which has a copy of the model on each of its devices."""

    kind: Literal["mirrored"]

    implementation: ClassVar[str] = "replica.mirrored:Mirrored"
    starter: ClassVar[str] = """\
One process; a copy of the model on each GPU, or on two parts of the CPU:
strategy: {kind: mirrored}
"""


class MultiWorkerMirroredSection(StrategySection):
    """Several processes (`cluster.workers`), each with one or more copies of the model."""

    kind: Literal["multi_worker_mirrored"]
    replicas_per_worker: Positive | Literal["auto"] = "auto"
    """Number of devices of each worker. `auto`: its share of the GPUs, or one CPU device."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """Implementation of the sums of gradients over workers. `auto`: NCCL between GPUs, shared memory between workers
    without GPUs on one host, a gRPC ring otherwise."""

    implementation: ClassVar[str] = "replica.multi_worker_mirrored:MultiWorkerMirrored"
    cluster_keys: ClassVar[frozenset[str]] = frozenset({"workers", "ports"})
    in_lockstep: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = True
    starter: ClassVar[str] = """\
Two processes, each with a copy of the model:
strategy: {kind: multi_worker_mirrored}
cluster: {workers: 2}
"""

    def problems(self, num_gpus: int | None) -> Iterator[Problem]:
        """Check settings for GPUs on a machine without any."""
        if num_gpus != 0:
            return
        if self.replicas_per_worker not in ("auto", 1):
            message = f"got {self.replicas_per_worker}, but this machine has no GPU"
            hint = "TensorFlow uses one replica on a CPU; write 'auto', and more `cluster.workers`"
            yield Problem(("strategy", "replicas_per_worker"), f"{message}, and {hint}")
        if self.communication == "nccl":
            message = "got 'nccl', which sums between GPUs, but this machine has no GPU; write 'auto'"
            yield Problem(("strategy", "communication"), message)

    def jobs(self, cluster: Cluster) -> dict[str, int]:
        return {"worker": cluster.num_workers}

    def num_devices(self, cluster: Cluster) -> int | None:
        return None if self.replicas_per_worker == "auto" else self.replicas_per_worker

    def num_parts(self, cluster: Cluster, num_gpus: int | None) -> int | None:
        workers = cluster.num_workers
        if self.replicas_per_worker != "auto":
            return workers * self.replicas_per_worker
        return None if num_gpus is None else workers * max(1, num_gpus // workers)

    def parts_in_words(self, cluster: Cluster, parts: int) -> str:
        workers = cluster.num_workers
        return f"{parts} replicas ({workers} workers x {parts // workers} each)" if workers > 1 else f"{parts} replicas"

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        return [counted(cluster.num_workers, "worker"), _replicas(self.num_parts(cluster, num_gpus))]

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        for number in replicas:
            # TensorFlow gives a worker without GPUs one CPU replica, so each replica then needs a worker
            workers = _TRIAL_WORKERS if num_gpus and number % _TRIAL_WORKERS == 0 else number
            section = {"kind": "multi_worker_mirrored", "replicas_per_worker": number // workers}
            yield section, {"workers": workers}

    @classmethod
    def trial_on_hosts(cls, workers: int, devices: int) -> TrialSections | None:
        return {"kind": "multi_worker_mirrored", "replicas_per_worker": devices}, {"workers": workers}


def _replicas(number: int | None) -> str:
    return "one replica for each device" if number is None else counted(number, "replica")
