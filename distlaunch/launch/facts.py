"""What happens to a run's processes, as data: the history that supervision decides on."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """Something that happened.

    Attributes:
        at: monotonic seconds.
    """

    at: float


@dataclass(frozen=True)
class Spawned(Fact):
    task: str


@dataclass(frozen=True)
class Came(Fact):
    """The task has loaded its framework."""

    task: str


@dataclass(frozen=True)
class Training(Fact):
    """The first step is about to run."""


@dataclass(frozen=True)
class Finished(Fact):
    """The task says that its part came to its planned end."""

    task: str


@dataclass(frozen=True)
class Exited(Fact):
    """The task's process has ended; `code` is -N for signal N."""

    task: str
    code: int


class Blame(enum.Enum):
    """What a task's error says about who is at fault."""

    CONFIG = "config"
    CAUSE = "cause"
    CONSEQUENCE = "consequence"


@dataclass(frozen=True)
class Blamed(Fact):
    """The task has written an error."""

    task: str
    blame: Blame


@dataclass(frozen=True)
class Asked(Fact):
    """The launcher was signalled."""

    number: signal.Signals


@dataclass(frozen=True)
class Sent(Fact):
    """The launcher has signalled all tasks that were left; of SIGUSR2, those that can answer."""

    number: signal.Signals


@dataclass(frozen=True)
class Rules:
    """What a run expects.

    Attributes:
        chief: the task whose end is the run's end.
        needs_finish: exit code 0 counts only after the task, or the chief, has told that it is finished.
        servers: tasks that serve until they are stopped.
    """

    chief: str
    needs_finish: bool
    start_timeout_s: float
    stop_timeout_s: float
    servers: frozenset[str] = frozenset()
