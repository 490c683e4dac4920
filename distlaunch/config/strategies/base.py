"""Traits of strategies, declared by their config classes; the rest of the program never asks for a strategy's kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, get_args

from distlaunch.base.errors import Problem
from distlaunch.config.backend import Backend
from distlaunch.config.base import Section
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import either

CPU_DEVICES = 2
"""Number of virtual devices without GPUs if the config gives no number (`replicas: auto`, or a mesh axis of -1)."""

_MOST_WORKERS, _MOST_CHOICES = 1_000, 8
"""Limits of a message that suggests numbers of workers: the largest such number, and how many of them it suggests."""

STEP, FUNCTIONAL_STEP = ("context", "batch"), ("context", "state", "batch")
"""Forms of a user's step function: one that changes the model, and one that returns the next state."""

TrialSections = tuple[dict[str, Any], dict[str, Any]]
"""The section `strategy` and the keys of `cluster` for a trial of `distlaunch verify`."""


class StrategySection(Section):
    """Traits of a strategy. The defaults are those of one process that changes the model in place."""

    is_neutral: ClassVar[bool] = True

    kind: Any
    """A different literal in each strategy; the first field, so that it comes first in files."""

    implementation: ClassVar[str]
    """`module:class` below `distlaunch.strategies`; a string, since configs import no framework."""
    backend: ClassVar[Backend] = "tensorflow"
    """Keras backend."""
    cluster_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of `cluster:` that this strategy uses and some others do not use."""
    in_lockstep: ClassVar[bool] = False
    """True if `cluster.workers` counts processes that take every step together, each with its part of the devices.

    `jobs` must then follow `cluster.workers`; `cluster_problems` can restrict the number.
    """
    has_coordinator: ClassVar[bool] = False
    """True if a coordinator assigns numbered batches to workers, and parameter servers hold the variables."""
    has_replicas: ClassVar[bool] = False
    """True if each of several copies of the model computes a part of the batch. Their gradients are then summed."""
    places_variables: ClassVar[bool] = False
    """True if tasks, or devices, hold different variables, or different parts of a variable."""
    refuses_jit_compile: ClassVar[bool] = False
    """True if `compile.jit_compile` is an error, because XLA cannot access all variables of a step."""
    step_forms: ClassVar[tuple[tuple[str, ...], ...]] = (STEP,)
    """Forms of arguments that a user's step function may take."""
    quick_export: ClassVar[str] = "saved_model"
    """A format that every model of this strategy can be exported in without starting another process."""
    starter: ClassVar[str] = ""
    """The strategy in the config of `distlaunch init`: a line that describes it, and its sections as one-line YAML."""

    @classmethod
    def own_kind(cls) -> str:
        """Return the kind that selects this class: the single literal of the field `kind`."""
        return get_args(cls.model_fields["kind"].annotation)[0]

    @property
    def runs_tensorflow(self) -> bool:
        """True if the model computes with TensorFlow, so that TensorFlow operations may be part of it."""
        return self.backend == "tensorflow"

    @property
    def is_functional(self) -> bool:
        """True if a step takes the model's state and returns the next one, with dense gradients throughout."""
        return FUNCTIONAL_STEP in self.step_forms

    @property
    def changes_in_place(self) -> bool:
        """True if a step may assign the model's variables."""
        return STEP in self.step_forms

    def processes(self, cluster: Cluster) -> dict[str, int]:
        """Return `jobs`, or an empty dict if all tasks run in one process (`cluster.hosting: in_process`)."""
        return {} if cluster.hosting == "in_process" else self.jobs(cluster)

    def jobs(self, cluster: Cluster) -> dict[str, int]:
        """Return the number of tasks of each job, in the order of `cluster.ports`; empty for a single process."""
        return {}

    def is_server(self, job: str) -> bool:
        """Return whether tasks of a job serve a coordinator until they are stopped."""
        return False

    def is_asynchronous(self, cluster: Cluster) -> bool:
        """Return whether several workers update the variables without waiting for each other."""
        return False

    def num_devices(self, cluster: Cluster) -> int | None:
        """Return the number of devices that each process uses; None for its share of the available ones."""
        return None

    def num_parts(self, cluster: Cluster, num_gpus: int | None) -> int | None:
        """Return the number of parts into which a global batch is divided; None if that depends on unknown devices."""
        return 1

    def parts_of_worker(self, worker: int, cluster: Cluster, num_gpus: int | None) -> tuple[int, int, int]:
        """Return the parts of each batch that a lockstep worker reads, as shown by `distlaunch plan --data`.

        Returns:
            The worker's first part, the number of its parts, and the number of all parts of a batch.
        """
        return worker, 1, cluster.num_workers

    def devices_needed(self, cluster: Cluster) -> tuple[Key, int] | None:
        """Return the config key that sets the number of devices of a process, and that number; None if any fits."""
        return None

    def parts_in_words(self, cluster: Cluster, parts: int) -> str:
        """Return the parts of a batch in words, as the subject of a sentence."""
        return f"{parts} replicas"

    def problems(self, num_gpus: int | None) -> Iterator[Problem]:
        """Yield problems of the section itself, beyond its types."""
        yield from ()

    def cluster_problems(self, cluster: Cluster, num_gpus: int | None) -> Iterator[Problem]:
        """Yield conflicts between the section and a cluster, except unused keys."""
        yield from ()

    def label(self, cluster: Cluster) -> str:
        """Return the label of this strategy in a table."""
        return self.kind

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        """Return the details for a one-line summary: workers, replicas, the mesh."""
        return []

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        """Yield the sections for each number of replicas, with which `distlaunch verify` and the tests train."""
        yield from ()

    @classmethod
    def trial_on_hosts(cls, workers: int, devices: int) -> TrialSections | None:
        """Return the sections in which processes on several hosts share each batch; None if that is impossible.

        Args:
            workers: number of processes.
            devices: number of devices of each process.
        """
        return None

    def on_one_device(self) -> StrategySection:
        """Return a section that trains the same model on one device, in one process."""
        return OneDeviceSection(kind="one_device")


class OneDeviceSection(StrategySection):
    """Strategy with one process and one device, the reference for all others."""

    kind: Literal["one_device"]

    implementation: ClassVar[str] = "replica.one_device:OneDevice"

    def num_devices(self, cluster: Cluster) -> int:
        return 1


def counted(number: int, noun: str) -> str:
    """Format a number with a noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def workers_that_share(total: int, workers: int) -> str:
    """Return, in words, the numbers of workers near `workers` that can share `total` devices or streams equally."""
    # both numbers come from a file and may be huge, so the search for divisors is limited
    divisors = [number for number in range(1, min(total, _MOST_WORKERS) + 1) if total % number == 0]
    nearest = sorted(divisors, key=lambda number: abs(number - workers))[:_MOST_CHOICES]
    return either(map(str, sorted(nearest)))
