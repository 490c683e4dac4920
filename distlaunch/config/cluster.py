"""`cluster:`, the number of processes, their ports and their timeouts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.config.base import Positive, PositiveSeconds, Section, Words


class Span(Section):
    """How many workers a job may have: it begins with `max`, or as many as there is room for, and goes on with
    fewer after it has lost one."""

    min: Positive = 1
    max: Positive


class Cluster(Section):
    """The processes of a run."""

    is_neutral: ClassVar[bool] = True

    workers: Annotated[
        Positive | Span | Literal["auto"], Words("a whole number of at least 1, {min: ..., max: ...}, or 'auto'")
    ] = 1
    """Worker processes (multi_worker_mirrored, parameter_server, dtensor, jax); `{min: 1, max: 4}` for a job that may
    go on with fewer after it has lost one, at the same global batch size. `auto`: one for each GPU of all hosts, or one
    on a host without, as many as can share the batch, the mesh or the streams; each start counts them anew."""
    ps: Annotated[int, Field(ge=0)] = 0
    """Parameter servers (parameter_server)."""
    hosting: Literal["processes", "in_process"] = "processes"
    """`in_process`: servers of a parameter_server cluster live in the coordinator's process."""
    evaluator: bool = False
    """Starts one more task, which evaluates each new checkpoint while training goes on."""
    ports: list[Annotated[int, Field(ge=1, le=65535)]] | Literal["auto"] = "auto"
    """One port for each task, workers first, on this machine. `auto`: free ones."""
    isolate: bool = False
    """Whether the job gets a network of its own on this machine, so that no other host reaches its ports. Its tasks
    then reach nothing but each other."""
    start_timeout_s: PositiveSeconds = 300.0
    """How long the processes may take from their start to the first step."""
    stop_timeout_s: PositiveSeconds = 30.0
    """How long a task may take to stop cleanly before it is killed."""
    stall_timeout_s: PositiveSeconds | None = 1800.0
    """How long training may go without any progress before the job counts as hung; null: for ever."""

    @property
    def num_workers(self) -> int:
        """The workers that a job begins with; 1 for `auto`, until an engine has counted its places."""
        if self.workers == "auto":
            return 1
        return self.workers.max if isinstance(self.workers, Span) else self.workers
