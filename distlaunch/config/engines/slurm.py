"""`engine: {kind: slurm}`: the nodes of a Slurm allocation, and the resources that `distlaunch submit` requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.base.errors import Problem
from distlaunch.base.plural import count
from distlaunch.config.base import OneLine, Positive, Words
from distlaunch.config.engines.base import EngineSection, Local, RemoteSection
from distlaunch.config.read.words import show

if TYPE_CHECKING:
    from distlaunch.config.run import RunConfig

Lines = Annotated[list[OneLine], Words("a list of options, such as ['--exclusive']")]
Time = Annotated[Positive | OneLine, Words("minutes, 'H:MM:SS', 'D-HH' or 'D-HH:MM:SS'")]
Gpus = Annotated[Positive | OneLine, Words("a whole number of at least 1, or TYPE:NUMBER such as 'a100:4'")]
Memory = Annotated[Positive | OneLine, Words("megabytes, or a number with K, M, G or T, such as '64G'")]

_TIME = re.compile(r"(\d+-)?\d+(?::\d+){0,2}\Z", re.ASCII)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?([1-9][0-9]*)\Z")
_MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?\Z", re.IGNORECASE)


_OURS = "distlaunch sets it itself; remove it"
_NO_ARRAY = "an array would train the same run several times; submit one job for each config"
SBATCH_FLAGS: Mapping[str, str] = {
    **{f"--{key.replace('_', '-')}": f"use engine.{key}" for key in (
        "account", "partition", "qos", "time", "nodes", "mem", "constraint", "exclude", "dependency", "job_name",
        "output",
    )},
    "--gpus-per-node": "use engine.gpus",
    "--ntasks-per-node": "use engine.workers_per_node",
    "--ntasks": "use engine.nodes and workers_per_node",
    "--cpus-per-task": "use engine.cpus",
    "--array": _NO_ARRAY,
    **dict.fromkeys(("--signal", "--requeue", "--no-requeue", "--open-mode"), _OURS),
    **dict.fromkeys(("--chdir", "--parsable", "--quiet", "--verbose", "--wait", "--wrap", "--test-only", "--help",
                     "--usage", "--version"), _OURS),
}  # fmt: skip
"""Options that are not allowed in `flags`, each with advice."""
_SBATCH_SHORT = {
    "A": "--account", "p": "--partition", "q": "--qos", "t": "--time", "N": "--nodes", "C": "--constraint",
    "x": "--exclude", "d": "--dependency", "J": "--job-name", "o": "--output", "n": "--ntasks", "c": "--cpus-per-task",
    "a": "--array", "D": "--chdir", "Q": "--quiet", "v": "--verbose", "W": "--wait", "h": "--help", "V": "--version",
}  # fmt: skip
_OTHER_SBATCH = {"--gpus", "--gres", "--exclusive", "--mem-per-cpu", "--mem-per-gpu"}
"""Flags of sbatch whose names are prefixes of names above without being abbreviations of them."""
SRUN_FLAGS: Mapping[str, str] = dict.fromkeys(
    ("--nodes", "--ntasks", "--nodelist", "--overlap", "--exclusive", "--mem", "--mpi", "--unbuffered", "--quiet",
     "--wait", "--input", "--output", "--error", "--label", "--pty", "--cpus-per-task", "--ntasks-per-node",
     "--multi-prog", "--jobid"), _OURS)  # fmt: skip
_SRUN_SHORT = {
    "N": "--nodes", "n": "--ntasks", "w": "--nodelist", "u": "--unbuffered", "Q": "--quiet", "W": "--wait",
    "i": "--input", "o": "--output", "e": "--error", "l": "--label", "c": "--cpus-per-task",
}  # fmt: skip


class Slurm(RemoteSection):
    """The nodes of the allocation in which this command runs, or that `distlaunch submit` requests.

    Slurm decides about a key that is null, unless the description of the key says otherwise.
    """

    kind: Literal["slurm"]

    implementation: ClassVar[str] = "distlaunch.engines.slurm.allocation:slurm_engine"
    queue: ClassVar[str] = "distlaunch.engines.slurm.queue:SlurmQueue"

    account: OneLine | None = None
    partition: OneLine | None = None
    qos: OneLine | None = None
    time: Time | None = None
    """The time limit, as sbatch reads it: minutes, `H:MM:SS`, `D-HH` or `D-HH:MM:SS`."""
    nodes: Positive | None = None
    """Number of nodes. null: as many as `cluster.workers` needs."""
    workers_per_node: Positive | None = None
    """Number of workers on each node. null: one for each requested GPU, or one without GPUs."""
    gpus: Gpus | None = None
    """The GPUs of each node; `a100:4` asks for a type."""
    cpus: Positive | None = None
    """The cores of each node."""
    mem: Memory | None = None
    """The memory of each node: megabytes, or a number with K, M, G or T."""
    constraint: OneLine | None = None
    exclude: OneLine | None = None
    """Nodes that must not be used, such as `n[3,7-9]`."""
    dependency: OneLine | None = None
    """Other jobs to wait for, such as `afterok:1234`."""
    job_name: OneLine | None = None
    """Name of the job in the queue. null: the name of the run."""
    output: OneLine | None = None
    """File for the output of the job, in the notation of sbatch. null: launcher.log in the run directory."""
    requeues: Annotated[int, Field(ge=0)] = 10
    """Maximum number of times that the job is requeued to resume after the time limit, preemption or a lost node."""
    grace_s: Annotated[int, Field(ge=1, le=65535)] = 120
    """Seconds before the time limit at which the job stops with a checkpoint."""
    setup: Annotated[list[str], Words("a list of shell commands, such as [module load cuda]")] = Field(
        default_factory=list
    )
    """Shell commands that run first on the job's first node. A command that fails ends the job."""
    srun: Lines = Field(default_factory=list)
    """Additional options of the `srun` that starts an agent on each node, such as those of a container; also used by
    `train` in an allocation."""
    flags: Lines = Field(default_factory=list)
    """Additional options of sbatch, such as `--exclusive`."""

    @property
    def num_gpus(self) -> int | None:
        """Return the number of GPUs of each node, of any type; None if unknown."""
        if self.gpus is not None:
            return _num_of_type(str(self.gpus))
        return next((number for flag in self.flags if (number := _gpus_of_flag(flag)) is not None), None)

    @property
    def node_workers(self) -> int:
        """Return the number of workers per node."""
        return self.workers_per_node or self.num_gpus or 1

    def for_one_device(self, environ: Mapping[str, str]) -> EngineSection:
        # outside an allocation, as on a login node, use this machine
        return Local(kind="local", warm_start=self.warm_start) if self.why_no_hosts(environ) else self

    def why_no_hosts(self, environ: Mapping[str, str]) -> str:
        return "" if "SLURM_JOB_ID" in environ else "this command does not run in a Slurm allocation"

    def is_secondary_task(self, environ: Mapping[str, str]) -> bool:
        return is_one_of_many(environ)

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        yield from _notations(self)
        yield from _flags("flags", self.flags, SBATCH_FLAGS, _SBATCH_SHORT)
        yield from _flags("srun", self.srun, SRUN_FLAGS, _SRUN_SHORT)
        if self.cpus is not None and self.workers_per_node is not None and self.cpus % self.workers_per_node:
            message = f"got {self.cpus} for {self.workers_per_node} workers on each node; expected a multiple"
            yield Problem(("engine", "cpus"), f"{message}, because Slurm gives each worker the same number")
        yield from self._too_few_nodes(config.cluster.num_workers)
        yield from super().problems(config)

    def _too_few_nodes(self, workers: int) -> Iterator[Problem]:
        """Yield a problem if the config sets a number of nodes that is too small for the workers."""
        asks_elsewhere = any(flag.startswith(("--gpus", "--gres", "-G")) for flag in self.flags)
        is_known = self.workers_per_node is not None or self.num_gpus is not None or not asks_elsewhere
        if self.nodes is not None and is_known and self.nodes * self.node_workers < workers:
            needed = -(-workers // self.node_workers)
            message = f"got {self.nodes}, with {count(self.node_workers, 'worker')} on each, for {workers} workers"
            yield Problem(("engine", "nodes"), f"{message}; use {needed}, or remove it, or set engine.workers_per_node")


def _num_of_type(gpus: str) -> int | None:
    match = _GPUS.match(gpus)
    return int(match[1]) if match else None


def _gpus_of_flag(flag: str) -> int | None:
    """Return the number of GPUs that an option of sbatch requests for each node; None if there is no such number."""
    name, _, value = flag.partition("=")
    if name == "--gpus-per-task":  # only without workers_per_node, when each node has one task
        return _num_of_type(value)
    if name != "--gres":
        return None
    # NAME, NAME:NUMBER, NAME:TYPE or NAME:TYPE:NUMBER
    requests = [each.split(":") for each in value.split(",")]
    numbers = [int(words[-1]) if words[-1].isdecimal() else 1 for words in requests if words[0] == "gpu"]
    return sum(numbers) or None


def is_in_allocation(environ: Mapping[str, str]) -> bool:
    """Return True if this process belongs to a Slurm job that also has other nodes."""
    # in a container, only some of the variables may be set
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        return False
    # a job whose only node is this machine has no other nodes
    return not (environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in environ)


def is_one_of_many(environ: Mapping[str, str]) -> bool:
    """Return True if `srun` has started this command several times and this is not the first."""
    return int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and environ.get("SLURM_PROCID", "0") != "0"


def time_limit_s(time: int | str) -> int | None:
    """Return the seconds of a time in Slurm's notation, or None if it is invalid.

    `30` and `30:00` are 30 minutes; `1-6` is 30 hours.
    """
    match = _TIME.match(str(time))
    if match is None:
        return None
    days, *parts = (
        [int(part) for part in re.split("[-:]", match[0])] if match[1] else [0, *map(int, match[0].split(":"))]
    )
    if match[1]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        # `M`, `M:S` or `H:M:S`
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def is_gpus(value: int | str) -> bool:
    """Return True if sbatch accepts a value as the GPUs of a node."""
    return _GPUS.match(str(value)) is not None


def is_memory(value: int | str) -> bool:
    """Return True if sbatch accepts a value as the memory of a node."""
    return _MEMORY.match(str(value)) is not None


def _notations(job: Slurm) -> Iterator[Problem]:
    if job.time is not None:
        limit = time_limit_s(job.time)
        if not limit:
            expected = "minutes such as 90, 'H:MM:SS', 'D-HH' or 'D-HH:MM:SS'"
            yield Problem(("engine", "time"), f"got {show(job.time)}; expected {expected}")
        elif limit <= job.grace_s:
            message = f"got {show(job.time)}, and the job stops {job.grace_s} s before its time limit"
            yield Problem(("engine", "time"), f"{message}; use a longer one, or lower engine.grace_s")
    if job.gpus is not None and not is_gpus(job.gpus):
        yield Problem(("engine", "gpus"), f"got {show(job.gpus)}; expected a number, or TYPE:NUMBER such as 'a100:4'")
    if job.mem is not None and not is_memory(job.mem):
        expected = "megabytes, or a number with K, M, G or T, such as '64G'"
        yield Problem(("engine", "mem"), f"got {show(job.mem)}; expected {expected}")


def _flags(name: str, flags: list[str], taken: Mapping[str, str], short: Mapping[str, str]) -> Iterator[Problem]:
    for number, flag in enumerate(flags):
        key = ("engine", name, number)
        option = flag.partition("=")[0]
        if not option.strip("-") or not option.startswith("-") or option.split() != [option]:
            yield Problem(key, f"got {show(flag)}; expected one option, such as '--exclusive' or '--gres=gpu:4'")
        elif clash := _taken(flag, taken, short):
            yield Problem(key, f"got {show(flag)}; {taken[clash]}")


def _taken(flag: str, taken: Mapping[str, str], short: Mapping[str, str]) -> str | None:
    """Return the option among `taken` that a flag, perhaps abbreviated, stands for; None if there is none."""
    if not flag.startswith("--"):
        return short.get(flag[1])
    name = flag.partition("=")[0]
    if name in taken:
        return name
    if name in _OTHER_SBATCH:
        return None
    # getopt accepts abbreviated names
    return next((option for option in taken if option.startswith(name)), None)
