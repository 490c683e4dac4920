"""The launch plan as data. `distlaunch plan` prints it, and `train` executes the same object."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distlaunch.agent.messages import Preload
from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.events import VariablesPlaced
from distlaunch.base.plural import listed
from distlaunch.base.protocol import (
    ATTEMPT,
    MODULES_FOLDER,
    READ_MODES,
    RUN_DIR,
    RUN_MODES,
    SAFE_MODULE,
    TASK,
    UNBUFFERED,
    WITH_TENSORFLOW,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.cluster.gpus import VISIBLE, share_gpus
from distlaunch.cluster.hardware import POOL_SIZES
from distlaunch.cluster.ports import REUSE_ENV
from distlaunch.cluster.settings import Cores, RunSettings, decide
from distlaunch.cluster.spec import EVALUATOR, ClusterSpec, Place, Task, by_host, places_of
from distlaunch.cluster.tf_config import to_tf_config
from distlaunch.config.checks.config import cross_check
from distlaunch.config.given_cluster import differing_sizes
from distlaunch.config.run import RunConfig
from distlaunch.plan.open_ports import describe_ports

Mode = Literal["train", "evaluate", "predict", "export", "verify", "run"]
"""Kinds of work of an attempt's tasks; `run` is for a user's script, which reports no steps."""

NO_GPU = ("-1",)  # no device, for CUDA
WAIT_FOR_CHIEF = ("--wait-for-chief",)
"""Option for a server that has a separate launcher: after SIGTERM, it serves until the chief has ended."""

REMOVED_ENV = ("TF_CONFIG",)
"""Variables that tasks do not inherit from the launcher."""
READ_LATE = ("TF_CONFIG", RUN_DIR, ATTEMPT, TASK, MODULES_FOLDER, VISIBLE, *REUSE_ENV, *POOL_SIZES)
"""Variables of a task that frameworks read when they look for devices, open a port or create threads, not when they are
imported. OpenBLAS reads its variable at its import, so its number of threads is set again: see `tasks.threads`."""


USES = ("evaluate", "predict", "export")
"""Modes of tasks that use a trained model, and import fewer modules ahead."""


@dataclass(frozen=True)
class TaskPlan:
    """The plan of one process: its command, additional environment variables, and files.

    Attributes:
        address: the address at which other tasks reach the process; None if it needs no address.
        serves: whether the task is a worker or ps that serves a coordinator until it is stopped.
        unsupervised: whether the task is a program that does not report events. It counts as up when it runs.
        host: the host of the task; empty for this machine.
        preload: imports that can be made before the task starts; None to start a fresh process.
        cores: the cores to which the process is bound; empty for all cores of the host.
    """

    task: Task
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: TaskDir
    address: str | None = None
    serves: bool = False
    unsupervised: bool = False
    host: str = ""
    preload: Preload | None = None
    cores: Cores = frozenset()

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form of this task. TF_CONFIG has no `cluster`, which is stored once in the plan.

        Otherwise the plan of a thousand tasks would have a million addresses.
        """
        known = {"TF_CONFIG": {"task": self.task.to_plain()}} if "TF_CONFIG" in self.env else {}
        return {
            "task": str(self.task),
            "address": self.address,
            "argv": list(self.argv),
            "env": {**self.env, **known},
            "logs": str(self.files.path),
            **({"host": self.host} if self.host else {}),
            **({"serves": True} if self.serves else {}),
            **({"cores": sorted(self.cores)} if self.cores else {}),
        }


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of all processes that this launcher starts for one attempt.

    Attributes:
        chief: the task that writes checkpoints and the run's events. Another launcher may start it.
        elsewhere: addresses of the cluster's tasks that other launchers start.
        cluster: the cluster in TF_CONFIG of the tasks; empty if no task gets TF_CONFIG.
        engine: the name of the engine: a kind of `engine:`, or `tf_config` for one task of a given cluster.
        settings: the variables that were chosen because of the hardware of the hosts.
        warnings: warnings about the settings and the devices of the tasks.
    """

    run_dir: Path
    attempt: int
    mode: Mode
    tasks: tuple[TaskPlan, ...]
    start_timeout_s: float
    stop_timeout_s: float
    stall_timeout_s: float | None = None
    chief: Task = Task("worker", 0)  # noqa: RUF009 (frozen)
    elsewhere: Mapping[str, str] | None = None
    cluster: ClusterSpec = ClusterSpec({})  # noqa: RUF009 (frozen)
    engine: str = "local"
    settings: RunSettings = RunSettings()  # noqa: RUF009 (frozen)
    warnings: tuple[str, ...] = ()

    @property
    def lead(self) -> Task:
        """The task whose events are about the run: the chief, or the first task of this launcher."""
        here = [plan.task for plan in self.tasks]
        return self.chief if self.chief in here else here[0]

    @property
    def is_run(self) -> bool:
        """Return True if the plan trains or runs a script, rather than using the model of an existing run."""
        return self.mode in RUN_MODES

    @property
    def is_reader(self) -> bool:
        """Return True if the plan uses the trained model of a run and writes only to its own attempt."""
        return self.mode in READ_MODES

    @property
    def events(self) -> Path:
        """The event file of the lead task."""
        run = RunDir(self.run_dir)
        return run.reader_events(self.attempt) if self.is_reader else run.events

    @property
    def is_beside(self) -> bool:
        """Return True if this launcher starts only an evaluator for a run of another launcher."""
        return self.lead.job == "evaluator"

    def to_plain(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "attempt": self.attempt,
            "mode": self.mode,
            "engine": self.engine,
            "chief": str(self.chief),
            "start_timeout_s": self.start_timeout_s,
            "stop_timeout_s": self.stop_timeout_s,
            "stall_timeout_s": self.stall_timeout_s,
            **({"cluster": self.cluster.to_plain()} if self.cluster.tasks else {}),
            "tasks": [task.to_plain() for task in self.tasks],
            **({"elsewhere": dict(self.elsewhere)} if self.elsewhere else {}),
            **({"settings": self.settings.to_plain()} if self.settings.hosts else {}),
        }


def worker_argv(
    run_dir: Path, attempt: int, task: Task, mode: Mode, extra: Sequence[str] = (), python: str = ""
) -> tuple[str, ...]:
    """Return the command that runs one task; see `Place` for `python`."""
    arguments = ["--run-dir", str(run_dir), "--attempt", str(attempt), "--task", str(task), "--mode", mode, *extra]
    return (python or sys.executable, *SAFE_MODULE, "distlaunch.tasks.worker", *arguments)


def config_mark_arguments(text: str) -> tuple[str, str]:
    """Return the arguments by which a task checks that it reads the config that was written for it."""
    return "--config-sha256", hashlib.sha256(text.encode()).hexdigest()


def cluster_at(jobs: Mapping[str, int], addresses: Sequence[str]) -> ClusterSpec:
    """Return the cluster with the given number of tasks of each job, which get the addresses in order."""
    remaining = iter(addresses)
    return ClusterSpec({job: tuple(next(remaining) for _ in range(count)) for job, count in jobs.items() if count})


def fit_config(config: RunConfig, cluster: ClusterSpec) -> RunConfig:
    """Return the config with the numbers of tasks of a given cluster (TF_CONFIG).

    Raises ConfigError if the tasks cannot share the global batch or the mesh.
    """
    sizes = differing_sizes(config, cluster)
    if not sizes:
        return config
    if problems := cross_check(config, None, given=sizes):
        raise ConfigError(problems)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=sizes)})


def task_run_name(name: str, cluster: ClusterSpec, here: Task | None) -> str:
    """Return the name of the run of this launcher. A launcher for a single task of a cluster has a separate run."""
    # an evaluator uses the chief's run
    return (
        name if here is None or here == cluster.chief or here.job == "evaluator" else f"{name}-{here.job}-{here.index}"
    )


def plan_launch(
    config: RunConfig,
    run: RunDir,
    attempt: int,
    mode: Mode,
    cluster: ClusterSpec,
    *,
    here: Task | None = None,
    places: Sequence[Place] = (),
    extra: Sequence[str] = (),
    engine: str = "local",
    recorded: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the plan of an attempt without side effects. Raise UsageError if there are too few GPUs.

    Args:
        cluster: addresses of all tasks; empty for a single process.
        here: the only task to start if TF_CONFIG is given; None to start all tasks.
        places: the places of tasks: first the tasks with addresses, and last the evaluator. Tasks without a place run
            on this machine.
        extra: arguments for the worker.
        engine: see `LaunchPlan`.
        recorded: see `decide`; None for a new run.
    """
    chosen = _chosen(config, mode, cluster, here)
    place_of = places_of(chosen, places, cluster)
    shares, warnings = _gpu_shares(config, place_of)
    ports_are_reserved = here is None and bool(cluster.tasks)  # the ports of a given cluster are not reserved
    servers = [task for task in chosen if cluster.tasks and config.strategy.is_server(task.job)]
    more = {task: (*extra, *(WAIT_FOR_CHIEF if task == here else ())) for task in servers}
    computing = [task for task in chosen if task.job == "worker"]
    if here is not None:  # also count the workers of this host that other launchers start
        computing += [here] * (cluster.num_workers_beside(here) - len(computing))
    settings = settings_of(place_of, computing, recorded, backend=config.strategy.backend)
    cores = cores_of(place_of, computing, settings)
    tasks = tuple(
        TaskPlan(
            task=task,
            argv=worker_argv(run.path, attempt, task, mode, more.get(task, extra), place_of[task].python),
            env=settings.of(place_of[task].host).variables
            | _environment(
                task, cluster, shares.get(task), config.modules_folder, ports_are_reserved=ports_are_reserved
            )
            | {RUN_DIR: str(run.path), ATTEMPT: str(attempt), TASK: str(task)},
            files=run.task(attempt, str(task)),
            address=cluster.address(task) if task in cluster.tasks else None,
            serves=task in servers,
            host=place_of[task].host,
            preload=preload_for(config, task, mode) if config.engine.warm_start else None,
            cores=cores.get(task, frozenset()),
        )
        for task in chosen
    )
    return LaunchPlan(
        *(run.path, attempt, mode, tasks),
        start_timeout_s=config.cluster.start_timeout_s,
        stop_timeout_s=config.cluster.stop_timeout_s,
        stall_timeout_s=config.cluster.stall_timeout_s,
        chief=cluster.chief,
        elsewhere={str(task): cluster.address(task) for task in cluster.tasks if task not in chosen},
        cluster=cluster,
        engine=engine,
        settings=settings,
        warnings=(*settings.warnings, *warnings),
    )


def settings_of(
    places: Mapping[Task, Place],
    computing: Sequence[Task],
    recorded: Mapping[str, str] | None = None,
    *,
    backend: str | None = None,
) -> RunSettings:
    """Return the settings of tasks; see `decide`. Hosts of unknown hardware get none.

    Args:
        computing: the tasks that compute most of the time and share the cores of their host.
    """
    hosts = {place.host: place.hardware for place in places.values() if place.hardware is not None}
    on = [places[task].host for task in computing]
    return decide(hosts, {host: max(1, on.count(host)) for host in hosts}, backend=backend, recorded=recorded)


def cores_of(places: Mapping[Task, Place], computing: Sequence[Task], settings: RunSettings) -> dict[Task, Cores]:
    """Return the cores of each computing task; empty for a task that may use all cores of its host."""
    shares = {host: iter(each.cores) for host, each in settings.hosts.items()}
    return {task: next(shares.get(places[task].host, iter(())), frozenset[int]()) for task in computing}


def _chosen(config: RunConfig, mode: Mode, cluster: ClusterSpec, here: Task | None) -> tuple[Task, ...]:
    """Return the tasks that this launcher starts."""
    if here is not None:
        return (here,)
    evaluator = (EVALUATOR,) if config.cluster.evaluator and mode == "train" else ()
    return (*(cluster.tasks or (cluster.chief,)), *evaluator)


def _environment(
    task: Task, cluster: ClusterSpec, gpus: tuple[str, ...] | None, modules: Path | None, *, ports_are_reserved: bool
) -> dict[str, str]:
    return {
        # the evaluator runs alone: with TF_CONFIG, it would wait for the cluster
        **({"TF_CONFIG": to_tf_config(cluster, task)} if task in cluster.tasks and task.job != "evaluator" else {}),
        **(REUSE_ENV if ports_are_reserved and task in cluster.tasks else {}),
        **({VISIBLE: ",".join(gpus)} if gpus is not None else {}),
        **({MODULES_FOLDER: str(modules)} if modules is not None else {}),
        **UNBUFFERED,
    }


def _gpu_shares(config: RunConfig, places: Mapping[Task, Place]) -> tuple[dict[Task, tuple[str, ...]], list[str]]:
    """Return the GPUs of each task, and warnings. A task that is missing sees all GPUs of its host."""
    # an evaluator must not use GPU memory that training needs
    shares: dict[Task, tuple[str, ...]] = {
        task: NO_GPU for task, place in places.items() if task.job == "evaluator" and place.gpus
    }
    training = by_host({task: place for task, place in places.items() if task.job != "evaluator"})
    number, warnings = config.strategy.num_devices(config.cluster), list[str]()
    if config.strategy.in_lockstep and config.strategy.processes(config.cluster):
        share, unused = _equal_share([(places[tasks[0]].host, gpus, len(tasks)) for gpus, tasks in training])
        if number is None:
            number, warnings = share, unused
    for gpus, tasks in training:
        if gpus:
            shares |= _training_shares(config, tasks, gpus, number)
    return shares, warnings


def _equal_share(hosts: Sequence[tuple[str, Sequence[str], int]]) -> tuple[int | None, list[str]]:
    """Return the number of GPUs that every worker can have, and warnings about GPUs that are not used.

    The workers of a collective must have the same number of devices.

    Args:
        hosts: the name, the GPUs and the number of workers of each host.

    Returns:
        The number; None if there are no GPUs, or if a host has too few for its workers.

    Raises:
        UsageError: only some hosts have GPUs.
    """
    with_gpus, without = ([name for name, gpus, _ in hosts if bool(gpus) is wanted] for wanted in (True, False))
    if with_gpus and without:
        raise UsageError(
            f"there are GPUs on {listed(with_gpus)}, but none on {listed(without)}, and all workers need the same "
            f"number: leave out the hosts of one kind, or hide the GPUs with {VISIBLE}='' there to train on CPUs"
        )
    share = min((len(gpus) // workers for _, gpus, workers in hosts), default=0)
    warnings = [
        f"{name}: {share * workers} of {len(gpus)} GPUs are used, since all workers need the same number of GPUs"
        for name, gpus, workers in hosts
        if 0 < share < len(gpus) // workers
    ]
    return share or None, warnings


def _training_shares(
    config: RunConfig, tasks: Sequence[Task], gpus: Sequence[str], number: int | None
) -> dict[Task, tuple[str, ...]]:
    """Return the GPUs of the tasks of a host that train.

    Args:
        number: the number of GPUs of each worker; None for an equal share.
    """
    if not config.strategy.processes(config.cluster):
        return {} if number is None or number > len(gpus) else {tasks[0]: tuple(gpus[:number])}
    workers = [task for task in tasks if task.job == "worker" or config.strategy.in_lockstep]
    # a single task on its host may use all GPUs
    if not workers or (len(tasks) == 1 and (number is None or number >= len(gpus))):
        return {}
    shares = share_gpus(gpus, len(workers), number)
    # servers and coordinators get no GPUs
    return {**dict.fromkeys(tasks, ()), **dict(zip(workers, shares, strict=True))}


def render_plan(plan: LaunchPlan, config: RunConfig) -> str:
    """Return the plan as text, with commands that users can copy."""
    stall = "" if plan.stall_timeout_s is None else f", {plan.stall_timeout_s:g} s without progress"
    lines = [
        f"run       {plan.run_dir}, attempt {plan.attempt}",
        f"strategy  {config.strategy.kind}, global batch {config.data.global_batch or 'of the data'}",
        f"engine    {plan.engine}",
        f"deadlines {plan.start_timeout_s:g} s to the first step, {plan.stop_timeout_s:g} s to stop{stall}",
        *([f"ports     {ports}"] if (ports := describe_plan_ports(plan, config)) else []),
    ]
    unknown = list(
        dict.fromkeys(task.host for task in plan.tasks if task.host and task.host not in plan.settings.hosts)
    )
    if unknown:
        lines += ["", f"settings  decided at the start, from the hardware of {', '.join(unknown)}"]
    lines += ["", *settings] if (settings := settings_lines(plan.settings)) else []
    for number, task in enumerate(plan.tasks, 1):
        role = " (chief)" if task.task == plan.chief and len(plan.tasks) > 1 else ""
        where = f"  {task.address}" if task.address else ""
        lines += ["", f"task {number} of {len(plan.tasks)}: {task.task}{role}{where}"]
        lines += [f"  {name}={value}" for name, value in task.env.items()]
        lines += [f"  bound to the cores {', '.join(map(str, sorted(task.cores)))}"] if task.cores else []
        lines += ["  " + " ".join(task.argv), f"  logs in {task.files.path}"]
    if plan.elsewhere:
        lines += [
            "",
            "started by other launchers:",
            *(f"  {task}  {address}" for task, address in plan.elsewhere.items()),
        ]
    return "\n".join(lines)


def settings_lines(settings: RunSettings) -> list[str]:
    """Return the lines that show each setting with its reason; none if there are no settings."""
    lines = ["settings of the tasks, and why"] if settings.rows else []
    for setting, hosts in settings.rows:
        where = f" on {', '.join(hosts)}" if hosts else ""
        lines.append(f"  {setting.name}={setting.value}{where}: {setting.reason}")
    return lines


def describe_plan_ports(plan: LaunchPlan, config: RunConfig) -> str:
    """Return a sentence on the ports that the tasks open and who reaches them, or an empty string."""
    addresses = [task.address for task in plan.tasks if task.address is not None]
    hosts = list(dict.fromkeys(task.host for task in plan.tasks if task.host))
    return describe_ports(addresses, hosts, isolated=config.cluster.isolate) if addresses else ""


def plan_json(
    plan: LaunchPlan,
    placed: VariablesPlaced | None = None,
    data: Mapping[str, Any] | None = None,
    note: str = "",
    ports: str = "",
) -> str:
    """Return the plan as in plan.json, with the placement of variables and data if known.

    Args:
        note: a message about the run that is resumed.
        ports: see `describe_plan_ports`.
    """
    where: dict[str, Any] = {**({"note": note} if note else {}), **({"ports": ports} if ports else {})}
    if placed is not None:
        where |= {**({"mesh": placed.mesh} if placed.mesh else {}), "variables": placed.variables}
    if data is not None:
        where["data"] = data
    return json.dumps({**plan.to_plain(), **where}, indent=2)


def preload_for(config: RunConfig, task: Task, mode: str) -> Preload:
    """Return what every task of a run imports."""
    backend, use = config.backend_of(task.job), [mode] if mode in USES else []
    # for other data, a task learns only from the result of its data function whether it needs TensorFlow
    also = [WITH_TENSORFLOW] if not config.strategy.runs_tensorflow and config.data.is_mapped_by_tensorflow else []
    return Preload("distlaunch.tasks.preload", (backend, *use, *also), READ_LATE)
