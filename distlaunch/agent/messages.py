"""Messages about tasks between the launcher and the agents, as plain data that can be sent over a connection.

Records that agents import are named tuples, since importing `dataclasses` took a quarter of the agents' start time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LOST_HOST = "the host "
"""Beginning of a failure's reason if a host is lost.

This reason is a whole sentence. Every other reason follows the name of a task.
"""


class Order(enum.Enum):
    """An order of the launcher to a task."""

    STOP = "stop"
    """End after the step on which all tasks agree, with a checkpoint."""
    KILL = "kill"
    """End now, including the child processes of the task."""
    DUMP = "dump"
    """Write the Python stacks to the error log."""


class Exit(NamedTuple):
    """The end of a task's process.

    Attributes:
        code: the exit code; -N for signal N.
        oom: whether the kernel's OOM killer has ended a process of the host since the tasks began; None if unknown.
        lost: why the host is lost; empty if the host itself has reported this end.
    """

    code: int
    oom: bool | None = None
    lost: str = ""


class Preload(NamedTuple):
    """The imports of a task. The task may be forked from a process that has already done these imports.

    Attributes:
        module: a module whose function `main(arguments)` does the imports. The function returns why the process must
            not be forked, or an empty string.
        late_env: environment variables of the task that no import reads.
    """

    module: str
    arguments: tuple[str, ...] = ()
    late_env: tuple[str, ...] = ()


class TaskSpec(NamedTuple):
    """The specification of a task for the host that starts it.

    Attributes:
        argv: the command. `preload` is used only if the command consists of an interpreter, `-P -m`, a module and its
            arguments.
        env: the complete environment.
        heartbeat: the file to which the task writes its heartbeats.
        preload: the imports of the task; None to start a fresh process.
        cores: the cores that the task may use; empty for all cores of the agent.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout_log: Path
    stderr_log: Path
    heartbeat: Path
    preload: Preload | None = None
    cores: frozenset[int] = frozenset()
