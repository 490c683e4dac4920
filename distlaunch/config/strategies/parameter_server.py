"""`parameter_server`: workers compute, parameter servers hold the variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from distlaunch.base.errors import Problem
from distlaunch.config.base import Positive, Section
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.words import listed
from distlaunch.config.strategies.base import StrategySection, TrialSections, counted

_PARTITIONER_ARGS = {
    "min_size": ("min_shard_bytes", "max_shards"),
    "max_size": ("max_shard_bytes", "max_shards"),
    "fixed_shards": ("num_shards",),
}
_PARTITIONER_NEEDS = {"max_size": "max_shard_bytes", "fixed_shards": "num_shards"}


class Partitioner(Section):
    """Partitioner that splits large variables over parameter servers."""

    kind: Literal["min_size", "max_size", "fixed_shards"]
    min_shard_bytes: Positive | None = None
    max_shard_bytes: Positive | None = None
    max_shards: Positive | None = None
    num_shards: Positive | None = None

    def problems(self) -> Iterator[Problem]:
        """Yield arguments that this kind of partitioner does not take, and the one that it needs but does not have."""
        key = ("strategy", "partitioner")
        allowed = _PARTITIONER_ARGS[self.kind]
        for name in type(self).model_fields:
            if name != "kind" and name not in allowed and getattr(self, name) is not None:
                yield Problem((*key, name), f"not an argument of {self.kind}, which takes {listed(allowed)}; remove it")
        needed = _PARTITIONER_NEEDS.get(self.kind)
        if needed and getattr(self, needed) is None:
            yield Problem(key, f"missing '{needed}', which {self.kind} needs; add `{needed}: ...` below `partitioner:`")


class ParameterServerSection(StrategySection):
    """Workers compute, parameter servers hold the variables, updates are asynchronous."""

    # updates are asynchronous, so this strategy gives other numbers than the other strategies
    is_neutral: ClassVar[bool] = False
    neutral_keys: ClassVar[frozenset[str]] = frozenset({"partitioner"})

    kind: Literal["parameter_server"]
    partitioner: Partitioner | None = None
    """Division of variables among the servers. null: each variable is on one server as a whole."""

    implementation: ClassVar[str] = "parameter_server.strategy:ParameterServer"
    cluster_keys: ClassVar[frozenset[str]] = frozenset({"workers", "ps", "hosting", "ports"})
    has_coordinator: ClassVar[bool] = True
    places_variables: ClassVar[bool] = True
    refuses_jit_compile: ClassVar[bool] = True
    starter: ClassVar[str] = """\
Two workers that compute, and one server that holds the variables:
strategy: {kind: parameter_server}
cluster: {workers: 2, ps: 1}
"""

    def jobs(self, cluster: Cluster) -> dict[str, int]:
        return {"worker": cluster.num_workers, "ps": cluster.ps, "chief": 1}

    def is_server(self, job: str) -> bool:
        return job in ("worker", "ps")

    def is_asynchronous(self, cluster: Cluster) -> bool:
        return cluster.num_workers > 1

    def problems(self, num_gpus: int | None) -> Iterator[Problem]:
        if self.partitioner is not None:
            yield from self.partitioner.problems()

    def cluster_problems(self, cluster: Cluster, num_gpus: int | None) -> Iterator[Problem]:
        if not cluster.ps:
            message = "parameter_server needs at least 1 parameter server, got 0; write `ps: 1` below `cluster:`"
            yield Problem(("strategy", "kind"), message)

    def label(self, cluster: Cluster) -> str:
        return f"{self.kind}, {counted(cluster.num_workers, 'worker')}"

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        return [counted(cluster.num_workers, "worker"), counted(cluster.ps, "parameter server")]

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        for workers in (1, 2):
            yield {"kind": "parameter_server"}, {"workers": workers, "ps": 1}
