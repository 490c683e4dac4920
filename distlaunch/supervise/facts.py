"""Facts about a run's processes, as data. Supervision decides on the history of facts."""

from __future__ import annotations

import enum
import functools
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode

if TYPE_CHECKING:  # `report` reads events without the config
    from distlaunch.plan.train import LaunchPlan

PREEMPTION_CODE = 42
"""Exit code of TensorFlow's preemption handler. As with codes from 128 on, a restart is worthwhile."""


@dataclass(frozen=True)
class Fact:
    """Something that happened.

    Attributes:
        at: monotonic seconds.
    """

    at: float


@dataclass(frozen=True)
class Spawned(Fact):
    """The task's process has been started. Facts about an earlier process of the task no longer apply."""

    task: str


@dataclass(frozen=True)
class Ready(Fact):
    """The task has loaded its framework."""

    task: str


@dataclass(frozen=True)
class Progressed(Fact):
    """The task has reported a result."""

    task: str


@dataclass(frozen=True)
class Training(Fact):
    """The first step is about to run."""


@dataclass(frozen=True)
class Finished(Fact):
    """The task has reported the planned end of its work."""

    task: str


@dataclass(frozen=True)
class Closed(Fact):
    """The task has reported the end of its work, planned or not."""

    task: str


@dataclass(frozen=True)
class Exited(Fact):
    """The task's process has ended; `code` is -N for signal N."""

    task: str
    code: int


class ErrorRole(enum.Enum):
    """The role of a task's error: the cause or a consequence of the failure."""

    CONFIG = "config"
    CAUSE = "cause"
    CONSEQUENCE = "consequence"


@dataclass(frozen=True)
class ErrorReported(Fact):
    """The task has written an error."""

    task: str
    role: ErrorRole


@dataclass(frozen=True)
class Stalled(Fact):
    """The run makes no progress.

    Attributes:
        task: the task that blocks the others; empty if all wait for each other.
        frozen: True if its process sends no heartbeats.
    """

    task: str
    frozen: bool


@dataclass(frozen=True)
class Saving(Fact):
    """The task has begun or ended writing files that it alone writes: a checkpoint, an export, files of callbacks."""

    task: str
    over: bool = False


@dataclass(frozen=True)
class Absent(Fact):
    """The task has not opened its port in time, although others have opened theirs and wait for it."""

    task: str


@dataclass(frozen=True)
class Signal(Fact):
    """The launcher has received a signal."""

    number: signal.Signals


@dataclass(frozen=True)
class Sent(Fact):
    """The launcher has sent an order to tasks.

    Attributes:
        to: the tasks; empty for all that had not ended.
    """

    order: Order
    to: tuple[str, ...] = ()


@dataclass(frozen=True)
class GivenUp(Fact):
    """The launcher does not restart the task, and the run continues without it."""

    task: str


@dataclass(frozen=True)
class Rules:
    """The rules for the processes of a run.

    Attributes:
        chief: the task with which the run ends.
        needs_finish: exit code 0 is a failure unless the task or the chief has reported that it is finished.
        servers: tasks that serve until they are stopped. The chief needs them until it has ended.
        replaceable: tasks that are restarted when they end too early.
        optional: tasks that the run does not need. Their end is never a failure.
        needs_every_task: when one task is gone, the others can only finish the files that they are writing.
        scripts: the tasks run the user's programs. Exit code 0 is always a success, also of a server, and the run ends
            with the last task that is not a server. A task is restarted only if it was killed from outside, because a
            program that ends by itself would do so again.
    """

    chief: str
    needs_finish: bool
    start_timeout_s: float
    stop_timeout_s: float
    servers: frozenset[str] = frozenset()
    replaceable: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    needs_every_task: bool = False
    scripts: bool = False

    @classmethod
    def of(cls, plan: LaunchPlan) -> Rules:
        """Return the rules for the tasks of a plan."""
        servers = frozenset(str(task.task) for task in plan.tasks if task.serves)
        workers = frozenset(str(task.task) for task in plan.tasks if task.serves and task.task.job == "worker")
        evaluators = frozenset(str(task.task) for task in plan.tasks if task.task.job == "evaluator")
        lead = str(plan.lead)
        return cls(
            chief=lead,
            needs_finish=plan.mode == "train" and lead not in servers | evaluators,
            start_timeout_s=plan.start_timeout_s,
            stop_timeout_s=plan.stop_timeout_s,
            servers=servers,
            replaceable=workers | evaluators,
            optional=evaluators - {lead},
            needs_every_task=plan.mode == "train" and not servers,
            scripts=plan.mode == "run",
        )

    @functools.cached_property
    def auxiliary(self) -> frozenset[str]:
        """Return the tasks whose end does not end the run."""
        return self.servers | self.optional

    @property
    def preempted(self) -> tuple[int, ...]:
        """Return the exit codes of a task that was asked to end and can be resumed."""
        return (ExitCode.PREEMPTED, PREEMPTION_CODE) if self.scripts else (ExitCode.PREEMPTED,)
