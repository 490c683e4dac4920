"""Messages about tasks between the controller and the agents: plain data that can be sent over a connection.

Named tuples, as all records that agents import: `dataclasses` and its decorators took a quarter of their start.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LOST_HOST = "the host "
"""Prefix of the reason of a lost host, which is a sentence; other reasons follow the name of a task."""


class Order(enum.Enum):
    """An order of the controller to a task."""

    STOP = "stop"
    """End after the step that all agree on, with a checkpoint."""
    KILL = "kill"
    """End now, with everything that the task has started."""
    DUMP = "dump"
    """Write the Python stacks to the error log."""


class Exit(NamedTuple):
    """The end of a task's process.

    Attributes:
        code: the exit code; -N for signal N.
        oom: whether the kernel of its host has killed a process for lack of memory meanwhile; None: unknown.
        lost: why the host does not answer any more; empty: the host has reported this end.
    """

    code: int
    oom: bool | None = None
    lost: str = ""


class Preload(NamedTuple):
    """The imports of a task. A process that has made them may be forked for the task.

    Attributes:
        module: its `main(arguments)` imports, and returns why the process must not be forked then, or an empty text.
        late_env: environment variables of the task that nothing reads while it is imported.
    """

    module: str
    arguments: tuple[str, ...] = ()
    late_env: tuple[str, ...] = ()


class TaskSpec(NamedTuple):
    """The specification of a task for the host that starts it.

    Attributes:
        argv: the command; only an interpreter, `-P -m`, a module and its arguments can make use of a preload.
        env: the whole environment.
        heartbeat: the file that the task writes its signs of life to.
        preload: None: the task gets a fresh process.
        cores: those that it may use; empty: all that the agent may use.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout_log: Path
    stderr_log: Path
    heartbeat: Path
    preload: Preload | None = None
    cores: frozenset[int] = frozenset()
