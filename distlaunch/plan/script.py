"""The plan of a script's tasks, with the environment that describes the cluster to each of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from distlaunch.base.protocol import (
    ATTEMPT,
    JAX_BIND,
    JAX_COORDINATOR,
    JAX_PROCESS,
    JAX_PROCESSES,
    RUN_DIR,
    SCRIPT_ENTRY,
    TASK,
    UNBUFFERED,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.cluster.gpus import VISIBLE, share_gpus
from distlaunch.cluster.ports import REUSE_ENV
from distlaunch.cluster.spec import EVALUATOR, ClusterSpec, Place, Task, by_host, places_of
from distlaunch.cluster.tf_config import to_tf_config
from distlaunch.plan.train import NO_GPU, LaunchPlan, TaskPlan, cluster_at, cores_of, settings_of

LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class ScriptJob:
    """A program and the tasks that run it.

    Attributes:
        kind: whether `program` is a Python file, a Python module or another program.
        chief: whether to add a chief, which leads the workers. With parameter servers there always is one.
        jax: whether the tasks are JAX processes, which get no TF_CONFIG.
    """

    kind: Kind
    program: str
    arguments: tuple[str, ...] = ()
    workers: int = 1
    ps: int = 0
    chief: bool = False
    evaluator: bool = False
    jax: bool = False
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 30.0
    stall_timeout_s: float | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of tasks of each job."""
        return {"chief": int(self.chief or self.ps > 0), "worker": self.workers, "ps": self.ps}

    @property
    def slots(self) -> dict[str, int]:
        """The number of tasks of each job that need slots. A chief without parameter servers counts as a worker."""
        return self.counts if self.ps else {"worker": self.workers + self.chief}

    @property
    def num_addresses(self) -> int:
        return 1 if self.jax else sum(self.counts.values())

    def computes(self, task: Task) -> bool:
        """Return True if a task computes most of the time, unlike parameter servers and coordinators."""
        return task.job == "worker" or (task.job == "chief" and not self.ps)

    @property
    def num_tasks(self) -> int:
        return sum(self.counts.values()) + self.evaluator


def plan_script(
    job: ScriptJob,
    run: RunDir,
    attempt: int,
    places: Sequence[Place],
    environ: Mapping[str, str] = MappingProxyType({}),
    engine: str = "local",
) -> LaunchPlan:
    """Return the plan of an attempt. Raise UsageError if there are too few GPUs for the workers.

    Args:
        places: a place for each task, in the order of `counts`, with the evaluator last.
        environ: variables that the tasks inherit.
        engine: see `LaunchPlan`.
    """
    tasks = [Task(name, index) for name, count in job.counts.items() for index in range(count)]
    everyone = [*tasks, EVALUATOR] if job.evaluator else tasks
    place_of, addresses = places_of(everyone, places), [place.address for place in places if place.address]
    shares = {task: share for gpus, here in by_host(place_of) for task, share in _gpu_shares(job, here, gpus).items()}
    cluster = ClusterSpec({}) if job.jax else cluster_at(job.counts, addresses)
    computing = [task for task in tasks if job.computes(task)]
    settings = settings_of(place_of, computing)
    cores = cores_of(place_of, computing, settings)
    plans: list[TaskPlan] = []
    for task in everyone:
        files = run.task(attempt, str(task))
        # without parameter servers, workers train and end by themselves
        serves = job.ps > 0 and task.job in ("worker", "ps")
        env = {
            **settings.of(place_of[task].host).variables,
            **(_jax_variables(job, task, addresses[0]) if job.jax else _tensorflow_variables(cluster, task)),
            **({VISIBLE: ",".join(shares[task])} if task in shares else {}),
            **{RUN_DIR: str(run.path), ATTEMPT: str(attempt), TASK: str(task)},
            **UNBUFFERED,
            # otherwise servers print pages of settings
            **({LOG_LEVEL: "1"} if serves and LOG_LEVEL not in environ else {}),
        }
        address = cluster.address(task) if task in cluster.tasks else None
        argv = _argv(job, task, attempt, files, place_of[task].python)
        unsupervised, host = job.kind == "program", place_of[task].host
        plans.append(
            TaskPlan(task, argv, env, files, address, serves=serves, unsupervised=unsupervised, host=host,
                     cores=cores.get(task, frozenset()))
        )  # fmt: skip
    return LaunchPlan(
        *(run.path, attempt, "run", tuple(plans)),
        start_timeout_s=job.start_timeout_s,
        stop_timeout_s=job.stop_timeout_s,
        stall_timeout_s=job.stall_timeout_s,
        chief=tasks[0],
        cluster=cluster,
        engine=engine,
        settings=settings,
    )


def _argv(job: ScriptJob, task: Task, attempt: int, files: TaskDir, python: str) -> tuple[str, ...]:
    python = python or sys.executable
    if job.kind == "program":
        return (python if job.program == sys.executable else job.program, *job.arguments)
    options = [f"--task-dir={files.path}", f"--attempt={attempt}", f"--task={task}", f"--kind={job.kind}"]
    options += ["--jax-processes=yes"] * job.jax
    # `--` separates these options from those of the script
    return (python, "-c", SCRIPT_ENTRY, *options, "--", job.program, *job.arguments)


def _tensorflow_variables(cluster: ClusterSpec, task: Task) -> dict[str, str]:
    return {"TF_CONFIG": to_tf_config(cluster, task), **REUSE_ENV}


def _jax_variables(job: ScriptJob, task: Task, address: str) -> dict[str, str]:
    """Return the variables for JAX, and for Keras on JAX."""
    processes, number = str(job.workers), str(task.index)
    return {
        JAX_COORDINATOR: address,
        JAX_BIND: address,  # otherwise JAX would listen on all network interfaces
        JAX_PROCESSES: processes,
        JAX_PROCESS: number,
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": address,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": processes,
        "KERAS_DISTRIBUTION_PROCESS_ID": number,
    }


def _gpu_shares(job: ScriptJob, tasks: Sequence[Task], gpus: Sequence[str]) -> dict[Task, Sequence[str]]:
    """Return the GPUs of each task of a host. A task that is missing from the result sees all GPUs."""
    if not gpus or job.num_tasks == 1:
        return {}
    # a chief trains like the workers, unless it is the coordinator of parameter servers
    trainers = [task for task in tasks if job.computes(task)]
    shares = dict(zip(trainers, share_gpus(gpus, len(trainers), None), strict=True)) if len(trainers) > 1 else {}
    if len(trainers) == 1:
        shares = {trainers[0]: tuple(gpus)}
    return {**dict.fromkeys(tasks, NO_GPU), **shares}
