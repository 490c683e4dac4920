"""Checks of `engine.slurm:`: settings that sbatch would refuse, or that conflict with the rest of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distlaunch.base.errors import Problem
from distlaunch.base.plural import count
from distlaunch.config.read.words import show
from distlaunch.config.run import RunConfig
from distlaunch.config.slurm import Slurm, is_gpus, is_memory, time_limit_s

_KEY = ("engine", "slurm")
_OURS = "distlaunch sets it itself; remove it"
_NO_ARRAY = "an array would train the same run several times; submit one job for each config"
SBATCH_FLAGS: Mapping[str, str] = {
    **{f"--{key.replace('_', '-')}": f"use engine.slurm.{key}" for key in (
        "account", "partition", "qos", "time", "nodes", "mem", "constraint", "exclude", "dependency", "job_name",
        "output",
    )},
    "--gpus-per-node": "use engine.slurm.gpus",
    "--ntasks-per-node": "use engine.slurm.workers_per_node",
    "--ntasks": "use engine.slurm.nodes and workers_per_node",
    "--cpus-per-task": "use engine.slurm.cpus",
    "--array": _NO_ARRAY,
    **dict.fromkeys(("--signal", "--requeue", "--no-requeue", "--open-mode"), _OURS),
    **dict.fromkeys(("--chdir", "--parsable", "--quiet", "--verbose", "--wait", "--wrap", "--test-only", "--help",
                     "--usage", "--version"), _OURS),
}  # fmt: skip
"""What may not be among `flags`, and what to do instead."""
_SBATCH_SHORT = {
    "A": "--account", "p": "--partition", "q": "--qos", "t": "--time", "N": "--nodes", "C": "--constraint",
    "x": "--exclude", "d": "--dependency", "J": "--job-name", "o": "--output", "n": "--ntasks", "c": "--cpus-per-task",
    "a": "--array", "D": "--chdir", "Q": "--quiet", "v": "--verbose", "W": "--wait", "h": "--help", "V": "--version",
}  # fmt: skip
_OTHER_SBATCH = {"--gpus", "--gres", "--exclusive", "--mem-per-cpu", "--mem-per-gpu"}
"""Flags of sbatch whose names are the beginning of a name above, and which are no abbreviations of it."""
SRUN_FLAGS: Mapping[str, str] = dict.fromkeys(
    ("--nodes", "--ntasks", "--nodelist", "--overlap", "--exclusive", "--mem", "--mpi", "--unbuffered", "--quiet",
     "--wait", "--input", "--output", "--error", "--label", "--pty", "--cpus-per-task", "--ntasks-per-node",
     "--multi-prog", "--jobid"), _OURS)  # fmt: skip
_SRUN_SHORT = {
    "N": "--nodes", "n": "--ntasks", "w": "--nodelist", "u": "--unbuffered", "Q": "--quiet", "W": "--wait",
    "i": "--input", "o": "--output", "e": "--error", "l": "--label", "c": "--cpus-per-task",
}  # fmt: skip


def slurm_can_take_it(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Slurm's notations, and no option twice."""
    job = config.engine.slurm
    yield from _notations(job)
    yield from _flags("flags", job.flags, SBATCH_FLAGS, _SBATCH_SHORT)
    yield from _flags("srun", job.srun, SRUN_FLAGS, _SRUN_SHORT)
    if job.cpus is not None and job.workers_per_node is not None and job.cpus % job.workers_per_node:
        message = f"got {job.cpus} for {job.workers_per_node} workers on each node; expected a multiple"
        yield Problem((*_KEY, "cpus"), f"{message}, because Slurm gives each of them as many")


def nodes_suffice(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """The workers have a place. Without a number of nodes, as many are asked for as they need."""
    job, workers = config.engine.slurm, config.cluster.num_workers
    asks_elsewhere = any(flag.startswith(("--gpus", "--gres", "-G")) for flag in job.flags)
    is_known = job.workers_per_node is not None or job.gpus is not None or not asks_elsewhere
    if job.nodes is not None and is_known and job.nodes * job.node_workers < workers:
        needed = -(-workers // job.node_workers)
        message = f"got {job.nodes}, with {count(job.node_workers, 'worker')} on each, for {workers} workers"
        yield Problem((*_KEY, "nodes"), f"{message}; use {needed}, or remove it, or set engine.slurm.workers_per_node")


def _notations(job: Slurm) -> Iterator[Problem]:
    if job.time is not None:
        limit = time_limit_s(job.time)
        if not limit:
            expected = "minutes such as 90, 'H:MM:SS', 'D-HH' or 'D-HH:MM:SS'"
            yield Problem((*_KEY, "time"), f"got {show(job.time)}; expected {expected}")
        elif limit <= job.grace_s:
            message = f"got {show(job.time)}, and the job stops {job.grace_s} s before its time limit"
            yield Problem((*_KEY, "time"), f"{message}; use a longer one, or lower engine.slurm.grace_s")
    if job.gpus is not None and not is_gpus(job.gpus):
        yield Problem((*_KEY, "gpus"), f"got {show(job.gpus)}; expected a number, or TYPE:NUMBER such as 'a100:4'")
    if job.mem is not None and not is_memory(job.mem):
        expected = "megabytes, or a number with K, M, G or T, such as '64G'"
        yield Problem((*_KEY, "mem"), f"got {show(job.mem)}; expected {expected}")


def _flags(name: str, flags: list[str], taken: Mapping[str, str], short: Mapping[str, str]) -> Iterator[Problem]:
    for number, flag in enumerate(flags):
        key = (*_KEY, name, number)
        option = flag.partition("=")[0]
        if not option.strip("-") or not option.startswith("-") or option.split() != [option]:
            yield Problem(key, f"got {show(flag)}; expected one option, such as '--exclusive' or '--gres=gpu:4'")
        elif clash := _taken(flag, taken, short):
            yield Problem(key, f"got {show(flag)}; {taken[clash]}")


def _taken(flag: str, taken: Mapping[str, str], short: Mapping[str, str]) -> str | None:
    """The option among `taken` that a flag is, perhaps abbreviated."""
    if not flag.startswith("--"):
        return short.get(flag[1])
    name = flag.partition("=")[0]
    if name in taken:
        return name
    if name in _OTHER_SBATCH:
        return None
    # getopt takes the beginning of a name for the name
    return next((option for option in taken if option.startswith(name)), None)
