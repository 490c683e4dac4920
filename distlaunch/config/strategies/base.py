"""Traits of strategies. The config class of a strategy declares them; the rest of the program never asks its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from distlaunch.base.errors import Problem
from distlaunch.config.backend import Backend
from distlaunch.config.base import Section
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import either

CPU_DEVICES = 2
"""Virtual devices where their number is left open and there is no GPU: `replicas: auto`, a mesh axis of -1."""

_MOST_WORKERS, _MOST_CHOICES = 1_000, 8
"""What is suggested where workers cannot share something equally."""

STEP, FUNCTIONAL_STEP = ("context", "batch"), ("context", "state", "batch")
"""Forms of a user's step function: one that changes the model, and one that returns the next state."""

TrialSections = tuple[dict[str, Any], dict[str, Any]]
"""The section `strategy` and the keys of `cluster` of a trial of `distlaunch verify`."""


class StrategySection(Section):
    """The traits of a strategy. The defaults are those of one process that changes the model in place."""

    is_neutral: ClassVar[bool] = True

    kind: Any
    """A literal of its own in each strategy; the first field, so that it comes first in files."""

    implementation: ClassVar[str]
    """`module:class` below `distlaunch.strategies`. Text, since this side imports no framework."""
    backend: ClassVar[Backend] = "tensorflow"
    """What Keras runs on."""
    cluster_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of `cluster:` that mean something to some strategies only, this one among them."""
    in_lockstep: ClassVar[bool] = False
    """Whether `cluster.workers` counts processes that take every step together, each with its part of the devices.

    `jobs` must then follow `cluster.workers`; `cluster_problems` is the place to allow some numbers only."""
    has_coordinator: ClassVar[bool] = False
    """Whether a coordinator hands numbered batches to workers, and parameter servers hold the variables."""
    has_replicas: ClassVar[bool] = False
    """Whether copies of the model each compute a part of the batch, whose gradients are then summed."""
    places_variables: ClassVar[bool] = False
    """Whether tasks, or devices, hold different variables, or different parts of one."""
    can_jit_compile: ClassVar[bool] = True
    """Whether XLA can reach all variables of a step."""
    step_forms: ClassVar[tuple[tuple[str, ...], ...]] = (STEP,)
    """Arguments that a user's step function may take."""
    quick_export: ClassVar[str] = "saved_model"
    """A format that every model of this strategy can be exported in without starting another process."""

    @property
    def runs_tensorflow(self) -> bool:
        """Whether the model computes with TensorFlow, so that operations of TensorFlow may be part of it."""
        return self.backend == "tensorflow"

    @property
    def is_functional(self) -> bool:
        """Whether a step takes the model's state and returns the next, with dense gradients throughout."""
        return FUNCTIONAL_STEP in self.step_forms

    @property
    def changes_in_place(self) -> bool:
        """Whether a step may assign the model's variables."""
        return STEP in self.step_forms

    def processes(self, cluster: Cluster) -> dict[str, int]:
        """Processes of each job that a run starts, in the order of `cluster.ports`; empty for a single one."""
        return {} if cluster.hosting == "in_process" else self.jobs(cluster)

    def jobs(self, cluster: Cluster) -> dict[str, int]:
        """Tasks of each job, in the order of `cluster.ports`; empty where one process does everything."""
        return {}

    def is_server(self, job: str) -> bool:
        """Whether tasks of a job work for a coordinator, until they are stopped."""
        return False

    def is_asynchronous(self, cluster: Cluster) -> bool:
        """Whether several workers update the variables without waiting for each other."""
        return False

    def num_devices(self, cluster: Cluster) -> int | None:
        """Devices that each process takes; None: its share of those there are."""
        return None

    def num_parts(self, cluster: Cluster, num_gpus: int | None) -> int | None:
        """Equal parts that each global batch is cut into; None where that depends on devices that are not known."""
        return 1

    def parts_of_worker(self, worker: int, cluster: Cluster, num_gpus: int | None) -> tuple[int, int, int]:
        """What a worker that takes every step reads of each batch: the first of its parts, their number, and of how
        many; `distlaunch plan --data` shows it."""
        return worker, 1, cluster.num_workers

    def devices_needed(self, cluster: Cluster) -> tuple[Key, int] | None:
        """The devices that each process must have if the machine has GPUs, and the key that says so."""
        return None

    def parts_in_words(self, cluster: Cluster, parts: int) -> str:
        """The parts of a batch, as the subject of a sentence."""
        return f"{parts} replicas"

    def problems(self, num_gpus: int | None) -> Iterator[Problem]:
        """What is wrong with the section itself, beside its types."""
        yield from ()

    def cluster_problems(self, cluster: Cluster, num_gpus: int | None) -> Iterator[Problem]:
        """What does not fit between the section and a cluster, beside keys that it does not use."""
        yield from ()

    def label(self, cluster: Cluster) -> str:
        """The row of a table on this strategy."""
        return self.kind

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        """What a one-line summary says beside the name: workers, replicas, the mesh."""
        return []

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        """What `distlaunch verify` tries, for each number of replicas."""
        yield from ()

    def on_one_device(self) -> StrategySection:
        """What trains the same model on one device, in one process."""
        return OneDevice(kind="one_device")


class OneDevice(StrategySection):
    """One process, one device: the reference for all others."""

    kind: Literal["one_device"]

    implementation: ClassVar[str] = "replica.one_device:OneDevice"

    def num_devices(self, cluster: Cluster) -> int:
        return 1


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def workers_that_share(total: int, workers: int) -> str:
    """The numbers of workers nearest to `workers` that can share `total` devices or streams equally, in words."""
    # both are anything that a file can hold, so not all divisors are looked for
    divisors = [number for number in range(1, min(total, _MOST_WORKERS) + 1) if total % number == 0]
    nearest = sorted(divisors, key=lambda number: abs(number - workers))[:_MOST_CHOICES]
    return either(map(str, sorted(nearest)))
