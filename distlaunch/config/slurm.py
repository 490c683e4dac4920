"""`engine.slurm:`, what `distlaunch submit` asks Slurm for."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from distlaunch.config.base import Positive, Section, Words

# sbatch reads its options line by line
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$"), Words("text in one line")]
Lines = Annotated[list[OneLine], Words("a list of options, such as ['--exclusive']")]
Time = Annotated[Positive | OneLine, Words("minutes, 'H:MM:SS', 'D-HH' or 'D-HH:MM:SS'")]
Gpus = Annotated[Positive | OneLine, Words("a whole number of at least 1, or TYPE:NUMBER such as 'a100:4'")]
Memory = Annotated[Positive | OneLine, Words("megabytes, or a number with K, M, G or T, such as '64G'")]

_TIME = re.compile(r"(\d+-)?\d+(?::\d+){0,2}\Z", re.ASCII)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?([1-9][0-9]*)\Z")
_MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?\Z", re.IGNORECASE)


class Slurm(Section):
    """A batch job. What is null is left to Slurm."""

    account: OneLine | None = None
    partition: OneLine | None = None
    qos: OneLine | None = None
    time: Time | None = None
    """The time limit, as sbatch reads it: minutes, `H:MM:SS`, `D-HH` or `D-HH:MM:SS`."""
    nodes: Positive | None = None
    """null: as many as `cluster.workers` needs."""
    workers_per_node: Positive | None = None
    """null: one for each GPU that is asked for, or one."""
    gpus: Gpus | None = None
    """Of each node; `a100:4` asks for a type."""
    cpus: Positive | None = None
    """Of each node."""
    mem: Memory | None = None
    """Of each node: megabytes, or a number with K, M, G or T."""
    constraint: OneLine | None = None
    exclude: OneLine | None = None
    """Nodes that are not used, such as `n[3,7-9]`."""
    dependency: OneLine | None = None
    """Such as `afterok:1234`."""
    job_name: OneLine | None = None
    """null: the name of the run."""
    output: OneLine | None = None
    """Where the job's own output goes, as sbatch reads it. null: launcher.log in the run directory."""
    requeues: Annotated[int, Field(ge=0)] = 10
    """How often the job is queued again, to resume, after the time limit, preemption or a lost node."""
    grace_s: Annotated[int, Field(ge=1, le=65535)] = 120
    """How long before the time limit the job stops with a checkpoint."""
    setup: Annotated[list[str], Words("a list of shell commands, such as [module load cuda]")] = Field(
        default_factory=list
    )
    """Shell commands that run first on the job's first node. One that fails ends the job."""
    srun: Lines = Field(default_factory=list)
    """More options of the `srun` that starts an agent on each node, such as those of a container; also for `train` in
    an allocation."""
    flags: Lines = Field(default_factory=list)
    """More options of sbatch, such as `--exclusive`."""

    @property
    def num_gpus(self) -> int | None:
        """GPUs of each node, of whatever type; None: not known."""
        match = _GPUS.match(str(self.gpus))
        return int(match[1]) if match else None

    @property
    def node_workers(self) -> int:
        """How many workers a node takes."""
        return self.workers_per_node or self.num_gpus or 1


def time_limit_s(time: int | str) -> int | None:
    """The seconds that Slurm's notation means; None: it is none. `30` and `30:00` are minutes, `1-6` is 30 hours."""
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
    """Whether sbatch can read it as GPUs of a node."""
    return _GPUS.match(str(value)) is not None


def is_memory(value: int | str) -> bool:
    """Whether sbatch can read it as memory of a node."""
    return _MEMORY.match(str(value)) is not None
