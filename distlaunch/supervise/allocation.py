"""The interface of supervision to the hosts that an engine has found. Supervision does not know how they are reached.

When an allocation reports the end of a task, its logs, error.json and events are in the controller's run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from distlaunch.agent.messages import Exit, Order
from distlaunch.base.liveness import Liveness
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.plan.train import LaunchPlan, TaskPlan


class TaskHandle(Protocol):
    """A process of a task. `pid` is for users to see only."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def poll(self) -> Exit | None:
        """Return how the task ended, or None; its output has then been read. Never waits."""
        ...

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Send an order to the task, or also to what it has started."""

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
        """Make `wait` also return when this descriptor can be read; the caller reads it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until tasks have something to report; return True if the caller should check at once.

        That is so if the watched descriptor can be read, or a task of another host has ended.
        """
        ...

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """Wait until the files of the tasks, which have all ended, are here, or the user stops waiting."""


class Allocation(Protocol):
    """Hosts, devices and addresses for one attempt."""

    @property
    def places(self) -> Sequence[Place]:
        """Return a place for each requested process; those with addresses come first."""
        ...

    @property
    def given(self) -> tuple[ClusterSpec, Task] | None:
        """Return a given cluster and the only task of it to start; None to start all tasks."""
        ...

    @property
    def engine(self) -> str:
        """Return the name of the engine in plans: a kind of `engine:`, or `tf_config`."""
        ...

    @property
    def sees_tasks_at_once(self) -> bool:
        """Return whether the liveness of all tasks is from the same moment, so that small delays can be compared."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return what the user should know about the hosts."""
        ...

    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> AbstractContextManager[Starter]:
        """Yield the tasks of a plan, to be started; when the block is left, none of them is left.

        Args:
            show: takes the lines that they print.

        Raises UsageError: a host cannot have what its tasks need of the run directory.
        """
        ...

    def import_ahead(self, plan: LaunchPlan) -> None:
        """Start imports that the tasks of a plan will need, where possible, without waiting."""

    def listening(self, addresses: Collection[str]) -> set[str]:
        """Return the addresses on which a process listens."""
        ...

    def note_host_failure(self, host: str, /) -> None:
        """Record that a task on this host failed first, and not by an exception of its own."""

    def release_ports(self) -> None:
        """Release the ports: the tasks have bound them, and none will be restarted."""

    def release(self) -> None:
        """Release everything."""
