"""The cluster of a run: tasks, their addresses, and TensorFlow's TF_CONFIG for each."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from distlaunch.base.errors import UsageError

Job = Literal["chief", "worker", "ps", "evaluator"]
JOBS: tuple[str, ...] = get_args(Job)


@dataclass(frozen=True, order=True)
class Task:
    """One process of a run, e.g. `worker:1`."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    def to_plain(self) -> dict[str, Any]:
        """As in TF_CONFIG."""
        return {"type": self.job, "index": self.index}

    @staticmethod
    def parse(text: str) -> Task:
        """The inverse of `str`; raises UsageError."""
        job, _, index = text.partition(":")
        if job not in JOBS or not index.isdigit():
            raise UsageError(f"task {text!r}: expected JOB:INDEX with one of {', '.join(JOBS)}, e.g. worker:0")
        return Task(job, int(index))


@dataclass(frozen=True)
class ThisTask:
    """The task that this process is.

    Attributes:
        job: `worker`, `chief` (the coordinator of parameter servers), `ps` or `evaluator`.
        index: counts the tasks of the job.
        is_chief: whether it writes checkpoints; one task of each run does.
        num_workers: tasks that compute; 1 for a process of its own.
    """

    job: str
    index: int
    is_chief: bool
    num_workers: int


EVALUATOR = Task("evaluator", 0)


@dataclass(frozen=True)
class Place:
    """Where one process of a job runs.

    Attributes:
        host: its name; empty: this machine.
        address: `host:port` by which the other tasks reach it; empty: none of them needs to.
        gpus: all that the job may use on the host, as CUDA_VISIBLE_DEVICES names them.
        python: the host's interpreter; empty: that of this process.
    """

    host: str = ""
    address: str = ""
    gpus: tuple[str, ...] = ()
    python: str = ""


def by_host(places: Mapping[Task, Place]) -> list[tuple[tuple[str, ...], list[Task]]]:
    """The GPUs and the tasks of each host."""
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
        """All tasks; the chief, or worker 0 where there is no chief, comes first."""
        # in the order of JOBS, which begins with chief and worker
        return tuple(Task(job, index) for job in JOBS for index in range(len(self.jobs.get(job, ()))))

    @property
    def chief(self) -> Task:
        """The task that writes checkpoints and events."""
        return self.tasks[0] if self.tasks else Task("worker", 0)

    def address(self, task: Task) -> str:
        return self.jobs[task.job][task.index]

    def num_workers_beside(self, task: Task) -> int:
        """How many workers have the host's name in common with a task, itself included; 1 if it has no address."""
        if task not in self.tasks:
            return 1
        hosts = [address.rpartition(":")[0] for address in self.jobs.get("worker", ())]
        return max(1, hosts.count(self.address(task).rpartition(":")[0]))

    def to_plain(self) -> dict[str, list[str]]:
        """As in TF_CONFIG."""
        return {job: list(addresses) for job, addresses in self.jobs.items() if addresses}

    def tf_config(self, task: Task) -> str:
        """The value of TF_CONFIG for a task."""
        return json.dumps({"cluster": self.to_plain(), "task": task.to_plain()})


def places_of(tasks: Sequence[Task], places: Sequence[Place], cluster: ClusterSpec | None = None) -> dict[Task, Place]:
    """The place of each task: that of its address, or the next that is left; without one, on this machine."""
    left, found = list(places), dict[Task, Place]()
    addresses = {} if cluster is None else {task: cluster.address(task) for task in tasks if task in cluster.tasks}
    for task, address in addresses.items():
        # an address of a given cluster is none of ours
        place = next((place for place in left if place.address == address), None)
        if place is not None:
            found[task] = place
            left.remove(place)
    for task in tasks:
        if task not in found:
            found[task] = left.pop(0) if left else Place()
    return {task: found[task] for task in tasks}


def this_task() -> ThisTask:
    """Return which task this process is, from the TF_CONFIG that its launcher has set."""
    text = os.environ.get("TF_CONFIG")
    spec, task = from_tf_config(text) if text else (ClusterSpec({}), Task("worker", 0))
    # beside parameter servers the chief deals out steps; otherwise it is one of those that compute
    computing = ("worker",) if spec.jobs.get("ps") else ("worker", "chief")
    number = sum(len(spec.jobs.get(job, ())) for job in computing)
    return ThisTask(task.job, task.index, task == spec.chief, max(number, 1))


def from_tf_config(text: str) -> tuple[ClusterSpec, Task]:
    """Reads TF_CONFIG. Raises UsageError that says what is wrong with it."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"TF_CONFIG is not JSON: {error}; received {text[:80]!r}") from None
    cluster = data.get("cluster") if isinstance(data, dict) else None
    task = data.get("task") if isinstance(data, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise UsageError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}; '
            f"received {text[:120]!r}"
        )
    if "master" in cluster or task.get("type") == "master":
        raise UsageError("TF_CONFIG: unknown job 'master', which is what TensorFlow 1 calls the chief; write 'chief'")
    jobs = {str(job): _addresses(str(job), addresses) for job, addresses in cluster.items()}
    spec = ClusterSpec(jobs)
    job, index = task.get("type"), task.get("index")
    # JSON's true is an int in Python
    if job not in JOBS or not isinstance(index, int) or isinstance(index, bool):
        raise UsageError(f"TF_CONFIG: task must be a job of {', '.join(JOBS)} and an index; received {task!r}")
    # an evaluator takes no part in the cluster, so TensorFlow gives it no address there
    if job != "evaluator" and not 0 <= index < len(jobs.get(job, ())):
        raise UsageError(
            f"TF_CONFIG: task {job}:{index} is not in the cluster, which has {len(jobs.get(job, ()))} {job} address(es)"
        )
    return spec, Task(job, index)


def split_address(address: str) -> tuple[str, int]:
    """Host and port, as sockets take them: an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _addresses(job: str, addresses: Any) -> tuple[str, ...]:
    if job not in JOBS:
        raise UsageError(f"TF_CONFIG: unknown job {job!r}; expected one of {', '.join(JOBS)}")
    if not isinstance(addresses, list) or not addresses:
        raise UsageError(f"TF_CONFIG: {job}: expected a list of host:port; received {addresses!r}")
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not isinstance(address, str) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"TF_CONFIG: {job}: expected host:port; received {address!r}")
    return tuple(addresses)
