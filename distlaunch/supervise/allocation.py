"""The interface of supervision to the hosts that an engine has found. Supervision does not know how they are reached.

When an allocation reports the end of a task, its logs, error.json and events are in the controller's run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from distlaunch.agent.messages import Exit, Order
from distlaunch.base.signs import Signs
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.plan.train import LaunchPlan, TaskPlan


class TaskHandle(Protocol):
    """A process of a task. `pid` is for users to see only."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def poll(self) -> Exit | None:
        """How it ended, once it has; what it printed has then been taken. Never waits."""
        ...

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Passes an order on, to the task alone or also to what it has started."""

    def is_suspended(self) -> bool:
        """Whether somebody has stopped the process, as SIGSTOP does."""
        ...

    def signs(self) -> Signs:
        """Its last signs of life."""
        ...


class Starter(Protocol):
    """Starts tasks on the allocation's hosts."""

    def start(self, task: TaskPlan) -> TaskHandle:
        """Starts a task, perhaps again. Raises OSError if its program cannot be started."""
        ...

    def watch(self, fd: int) -> None:
        """`wait` also returns when this descriptor can be read; the caller reads it."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until tasks have something to report; returns whether to look at once.

        That is so if the watched descriptor can be read, or a task of another host has ended.
        """
        ...

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """All tasks have ended: waits until what they wrote is here, or the user does not want to wait."""


class Allocation(Protocol):
    """Hosts, devices and addresses for one attempt."""

    @property
    def places(self) -> Sequence[Place]:
        """One for each process that was asked for; those with addresses come first."""
        ...

    @property
    def given(self) -> tuple[ClusterSpec, Task] | None:
        """The cluster that is there already, and the only task of it to start; None: all tasks are to be started."""
        ...

    @property
    def engine(self) -> str:
        """What a plan calls the engine: a kind of `engine:`, or `tf_config`."""
        ...

    @property
    def sees_tasks_at_once(self) -> bool:
        """Whether the signs of life of all tasks are of the same moment, and so show who is a little behind."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know about the hosts."""
        ...

    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> AbstractContextManager[Starter]:
        """Opens the way to start the tasks of a plan; when it is left, all of them are gone.

        Args:
            show: takes the lines that they print.

        Raises UsageError: a host cannot have what its tasks need of the run directory.
        """
        ...

    def import_ahead(self, plan: LaunchPlan) -> None:
        """Begins to import what the tasks of a plan would wait for at their start, where it can; waits for nothing."""

    def listening(self, addresses: Collection[str]) -> set[str]:
        """Those of the addresses that somebody listens on."""
        ...

    def note_host_failure(self, host: str, /) -> None:
        """A task on this host was the first to fail, and not by an exception of its own."""

    def release_ports(self) -> None:
        """The tasks have bound their ports, and none will be started again."""

    def release(self) -> None:
        """Gives everything back."""
