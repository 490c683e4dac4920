"""The interface between supervision and an engine, which hides how hosts are reached.

When an allocation reports the end of a task, the logs, error.json and events of the task are in the launcher's run
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from distlaunch.agent.messages import Exit, Order
from distlaunch.base.liveness import Liveness
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.plan.train import LaunchPlan, TaskPlan


class TaskHandle(Protocol):
    """A process of a task. `pid` is only for messages to users."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def poll(self) -> Exit | None:
        """Return how the task ended, after all of its output has been read; None if it still runs. Never waits."""
        ...

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Send an order to the task, with `whole_group` also to its child processes."""

    def is_suspended(self) -> bool:
        """Return True if the process is suspended, as by SIGSTOP."""
        ...

    def liveness(self) -> Liveness:
        """Return the latest liveness of the task."""
        ...


class Starter(Protocol):
    """Starts tasks on the allocation's hosts."""

    def start(self, task: TaskPlan) -> TaskHandle:
        """Start or restart a task. Raise OSError if its program cannot be started."""
        ...

    def watch(self, fd: int) -> None:
        """Make `wait` also return when the caller can read from this descriptor."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until tasks have something to report.

        Returns:
            True if the caller should check at once: the watched descriptor is readable, or a task of another host has
            ended.
        """
        ...

    def send_file(self, path: Path) -> None:
        """Send a file of the run directory, which this process has written, to all hosts that have a copy of the run.

        Any thread may call this method until the tasks have ended. It never waits.
        """

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """Wait until the files of all tasks have been copied to this host, after the tasks have ended.

        Args:
            gives_up: return when this function returns True.
        """


class Allocation(Protocol):
    """Hosts, devices and addresses for one attempt."""

    @property
    def places(self) -> Sequence[Place]:
        """Return a place for each requested process. Places with addresses come first."""
        ...

    @property
    def given(self) -> tuple[ClusterSpec, Task] | None:
        """Return the cluster that TF_CONFIG describes, and the one task of it that is started here.

        Return None if all tasks are started here.
        """
        ...

    @property
    def engine(self) -> str:
        """Return the name of the engine in plans: a kind of `engine:`, or `tf_config`."""
        ...

    @property
    def has_comparable_heartbeats(self) -> bool:
        """Return True if the liveness of all tasks is read at the same moment, so that small delays are comparable."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return messages for the user about the hosts."""
        ...

    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> AbstractContextManager[Starter]:
        """Return a context manager that yields a starter for the tasks of a plan and ends all tasks on exit.

        Args:
            show: called with the name of a task and a line that it has printed.
            clock: returns monotonic seconds.

        Raises:
            UsageError: a host cannot get the files of the run directory that its tasks need.
        """
        ...

    def import_ahead(self, plan: LaunchPlan) -> None:
        """Start to import the modules that the tasks of a plan will need, if possible. Never waits."""

    def listening(self, addresses: Collection[str]) -> set[str]:
        """Return the addresses on which a process listens."""
        ...

    def note_host_failure(self, host: str, /) -> None:
        """Record that the first failure was that of a task on this host, for a cause outside its program."""

    def release_ports(self) -> None:
        """Release the ports after the tasks have bound them, if no task can be restarted."""

    def release(self) -> None:
        """Release everything."""
