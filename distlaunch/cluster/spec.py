"""The cluster of a run: its tasks, where they run, and their addresses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from distlaunch.base.errors import UsageError
from distlaunch.cluster.hardware import Hardware

Job = Literal["chief", "worker", "ps", "evaluator"]
JOBS: tuple[str, ...] = get_args(Job)


@dataclass(frozen=True, order=True)
class Task:
    """A process of a run, such as `worker:1`."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    def to_plain(self) -> dict[str, Any]:
        """Return the task in the form of TF_CONFIG."""
        return {"type": self.job, "index": self.index}

    @staticmethod
    def parse(text: str) -> Task:
        """Parse the result of `str`. Raise UsageError if it is not a task."""
        job, _, index = text.partition(":")
        if job not in JOBS or not index.isdigit():
            raise UsageError(f"task {text!r}: expected JOB:INDEX with one of {', '.join(JOBS)}, e.g. worker:0")
        return Task(job, int(index))


EVALUATOR = Task("evaluator", 0)


@dataclass(frozen=True)
class Place:
    """The place where a process of a job runs.

    Attributes:
        host: the name of the host; empty for this machine.
        address: the `host:port` at which other tasks reach the process; empty if the process needs no address.
        gpus: all GPUs that the job may use on the host, in the form of CUDA_VISIBLE_DEVICES.
        python: the interpreter on the host; empty for that of this process.
        hardware: the hardware of the host; None if it is unknown, as before a connection to the host.
    """

    host: str = ""
    address: str = ""
    gpus: tuple[str, ...] = ()
    python: str = ""
    hardware: Hardware | None = None


def by_host(places: Mapping[Task, Place]) -> list[tuple[tuple[str, ...], list[Task]]]:
    """Return the GPUs and tasks of each host."""
    hosts: dict[str, list[Task]] = {}
    for task, place in places.items():
        hosts.setdefault(place.host, []).append(task)
    return [(places[tasks[0]].gpus, tasks) for tasks in hosts.values()]


@dataclass(frozen=True)
class ClusterSpec:
    """Addresses (`host:port`) of the tasks of each job, in order of their index. Empty for a single process."""

    jobs: Mapping[str, tuple[str, ...]]

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, the chief (or worker 0) first."""
        # in the order of JOBS, which begins with chief and worker
        return tuple(Task(job, index) for job in JOBS for index in range(len(self.jobs.get(job, ()))))

    @property
    def chief(self) -> Task:
        """The task that writes checkpoints and events."""
        return self.tasks[0] if self.tasks else Task("worker", 0)

    def address(self, task: Task) -> str:
        return self.jobs[task.job][task.index]

    def num_workers_beside(self, task: Task) -> int:
        """Return the number of workers on the host of a task; 1 if there is none, or if the task has no address."""
        if task not in self.tasks:
            return 1
        hosts = [address.rpartition(":")[0] for address in self.jobs.get("worker", ())]
        return max(1, hosts.count(self.address(task).rpartition(":")[0]))

    def to_plain(self) -> dict[str, list[str]]:
        """Return the cluster in the form of TF_CONFIG."""
        return {job: list(addresses) for job, addresses in self.jobs.items() if addresses}


def places_of(tasks: Sequence[Task], places: Sequence[Place], cluster: ClusterSpec | None = None) -> dict[Task, Place]:
    """Return the place of each task: the place with its address, else the next unused place, else this machine."""
    left, found = list(places), dict[Task, Place]()
    addresses = {} if cluster is None else {task: cluster.address(task) for task in tasks if task in cluster.tasks}
    for task, address in addresses.items():
        # the addresses of a cluster that TF_CONFIG describes are not among the places
        place = next((place for place in left if place.address == address), None)
        if place is not None:
            found[task] = place
            left.remove(place)
    for task in tasks:
        if task not in found:
            found[task] = left.pop(0) if left else Place()
    return {task: found[task] for task in tasks}


def split_address(address: str) -> tuple[str, int]:
    """Return host and port in the form of sockets: an IPv6 address without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
