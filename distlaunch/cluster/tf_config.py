"""Writes and reads TF_CONFIG: the cluster, and the task that a process is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from distlaunch.base.errors import UsageError
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.cluster.spec import JOBS, ClusterSpec, Task

IS_CHECK = "DISTLAUNCH_IS_CHECK"
"""Environment variable of the process that compares the first steps with one device."""


@dataclass(frozen=True)
class ThisTask:
    """The task that this process is.

    Attributes:
        job: `worker`, `chief` (the coordinator of parameter servers), `ps` or `evaluator`.
        index: the index of the task among the tasks of the job.
        is_chief: whether the task writes checkpoints. Each run has one such task.
        num_workers: number of tasks that compute; 1 without a cluster.
        is_check: whether the process only compares the first steps with one device (`train.check`). It calls the
            model's function like the other tasks, and is not the chief.
    """

    job: str
    index: int
    is_chief: bool
    num_workers: int
    is_check: bool = False


def this_task() -> ThisTask:
    """Return the task that this process is, according to TF_CONFIG."""
    text = os.environ.get("TF_CONFIG")
    spec, task = from_tf_config(text) if text else (ClusterSpec({}), Task("worker", 0))
    # with parameter servers, the chief only assigns steps; otherwise it computes like a worker
    computing = ("worker",) if spec.jobs.get("ps") else ("worker", "chief")
    number = sum(len(spec.jobs.get(job, ())) for job in computing)
    is_check = IS_CHECK in os.environ
    return ThisTask(task.job, task.index, task == spec.chief and not is_check, max(number, 1), is_check)


def to_tf_config(cluster: ClusterSpec, task: Task) -> str:
    """Return the value of TF_CONFIG for a task."""
    return json.dumps({"cluster": cluster.to_plain(), "task": task.to_plain()})


def from_tf_config(text: str) -> tuple[ClusterSpec, Task]:
    """Parse TF_CONFIG. Raise UsageError with a message if it is invalid."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"TF_CONFIG is not JSON: {error}; received {text[:80]!r}") from None
    cluster = data.get("cluster") if is_dict(data) else None
    task = data.get("task") if is_dict(data) else None
    if not is_dict(cluster) or not is_dict(task):
        raise UsageError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}; '
            f"received {text[:120]!r}"
        )
    if "master" in cluster or task.get("type") == "master":
        raise UsageError("TF_CONFIG: unknown job 'master', the name of the chief in TensorFlow 1; write 'chief'")
    jobs = {str(job): _addresses(str(job), addresses) for job, addresses in cluster.items()}
    spec = ClusterSpec(jobs)
    job, index = task.get("type"), task.get("index")
    # JSON's true is an int in Python
    if job not in JOBS or not isinstance(index, int) or isinstance(index, bool):
        raise UsageError(f"TF_CONFIG: task must be a job of {', '.join(JOBS)} and an index; received {task!r}")
    # an evaluator is not part of the cluster, so it has no address in TF_CONFIG
    if job != "evaluator" and not 0 <= index < len(jobs.get(job, ())):
        raise UsageError(
            f"TF_CONFIG: task {job}:{index} is not in the cluster, which has {len(jobs.get(job, ()))} {job} address(es)"
        )
    return spec, Task(job, index)


def _addresses(job: str, addresses: Any) -> tuple[str, ...]:
    if job not in JOBS:
        raise UsageError(f"TF_CONFIG: unknown job {job!r}; expected one of {', '.join(JOBS)}")
    if not is_list(addresses) or not addresses:
        raise UsageError(f"TF_CONFIG: {job}: expected a list of host:port; received {addresses!r}")
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not isinstance(address, str) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"TF_CONFIG: {job}: expected host:port; received {address!r}")
    return tuple(addresses)
