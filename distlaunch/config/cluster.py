"""`cluster:`, the number of processes, their ports and their timeouts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.config.base import Positive, PositiveSeconds, Section, Words


class WorkerRange(Section):
    """A range of numbers of workers.

    A job starts with `max` workers, or with fewer if the hosts have fewer slots, and continues with fewer after it has
    lost one.
    """

    min: Positive = 1
    max: Positive


class Cluster(Section):
    """The processes of a run."""

    is_neutral: ClassVar[bool] = True

    workers: Annotated[
        Positive | WorkerRange | Literal["auto"], Words("a whole number of at least 1, {min: ..., max: ...}, or 'auto'")
    ] = 1
    """Number of worker processes, for strategies with several. `{min: 1, max: 4}`: the job may continue with fewer
    workers after it has lost one, at the same global batch size. `auto`: one for each GPU of all hosts, or one per host
    without GPUs; fewer if that number cannot share the batch, the mesh or the streams equally. GPUs and hosts are
    counted again at each start.
    """
    ps: Annotated[int, Field(ge=0)] = 0
    """Number of parameter servers, for `strategy.kind: parameter_server`."""
    hosting: Literal["processes", "in_process"] = "processes"
    """`in_process`: the servers of a parameter_server cluster run in the coordinator's process."""
    evaluator: bool = False
    """Start one more task, which evaluates each new checkpoint during training."""
    ports: list[Annotated[int, Field(ge=1, le=65535)]] | Literal["auto"] = "auto"
    """Ports of the tasks on this machine, one for each, workers first. `auto`: free ports."""
    isolate: bool = False
    """Give the job its own network on this machine, so that other hosts cannot reach its ports. Its tasks can then
    reach only each other.
    """
    start_timeout_s: PositiveSeconds = 300.0
    """Time that the processes may take from their start to the first step."""
    stop_timeout_s: PositiveSeconds = 30.0
    """Time that a task may take to stop cleanly before it is killed."""
    stall_timeout_s: PositiveSeconds | None = 1800.0
    """Time that training may go without progress before the job counts as hung; null: no limit."""

    @property
    def num_workers(self) -> int:
        """The number of workers that a job starts with; 1 for `auto`, until an engine has counted its slots."""
        if self.workers == "auto":
            return 1
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers
