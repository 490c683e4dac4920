"""The tasks of this host: started in groups of their own, read, signalled, and never left behind."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import TracebackType

from distlaunch.agent.memory import oom_kills
from distlaunch.agent.messages import Exit, Order, TaskSpec
from distlaunch.agent.output import LineSink, Pump
from distlaunch.agent.process import Child, Lifeline
from distlaunch.base.heartbeat import Signs, read_signs


class HostTasks:
    """Starts tasks on this host while it is entered; when it is left, all of them are gone.

    Args:
        show: takes the lines that tasks print.
        clock: monotonic seconds.
    """

    def __init__(self, show: LineSink, clock: Callable[[], float]) -> None:
        self._pump = Pump(show, clock)
        self._lifeline: Lifeline | None = None
        self._children: dict[str, Child] = {}
        self._oom_before = oom_kills()

    def __enter__(self) -> HostTasks:
        self._lifeline = Lifeline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._lifeline is not None
        for name, child in self._children.items():
            child.kill()
            self._pump.finish(name)
        self._pump.close()
        self._lifeline.close()

    def start(self, spec: TaskSpec) -> HostTask:
        """Starts a task, perhaps again. Raises OSError if its program cannot be started."""
        assert self._lifeline is not None
        child = self._children[spec.name] = Child(spec.argv, spec.env, self._lifeline)
        self._pump.add(spec.name, child.stdout, spec.stdout_log)
        self._pump.add(spec.name, child.stderr, spec.stderr_log)
        return HostTask(spec, child, self._pump, self.out_of_memory)

    def watch(self, fd: int) -> None:
        """`wait` also returns when this descriptor can be read; the caller reads it."""
        self._pump.watch(fd)

    def wait(self, timeout_s: float) -> bool:
        """Waits for output and takes a bounded part of it; returns whether the watched descriptor can be read."""
        return bool(self._pump.turn(timeout_s))

    def out_of_memory(self) -> bool | None:
        """Whether the kernel has killed for memory since this was made; None: not known."""
        now = oom_kills()
        return None if self._oom_before is None or now is None else now > self._oom_before


class HostTask:
    """A task of this host."""

    def __init__(self, spec: TaskSpec, child: Child, pump: Pump, out_of_memory: Callable[[], bool | None]) -> None:
        self._spec, self._child, self._pump, self._out_of_memory = spec, child, pump, out_of_memory
        self.host, self.pid = socket.gethostname(), child.pid

    def poll(self) -> Exit | None:
        """How it ended, once it has; all that it printed has then been taken, and its group is gone."""
        code = self._child.poll()
        if code is None:
            return None
        self._pump.finish(self._spec.name)
        return Exit(code, self._out_of_memory())

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Passes an order on.

        Args:
            whole_group: also ask what the task has started to stop; a task may need its own children to end well.
        """
        if order is Order.DUMP:
            self._child.dump_stacks()
        elif order is Order.KILL:
            self._child.send(signal.SIGKILL)
        else:
            self._child.send(signal.SIGTERM, leader_only=not whole_group)

    def is_suspended(self) -> bool:
        """Whether somebody has stopped the process, as SIGSTOP does."""
        return self._child.is_suspended()

    def signs(self) -> Signs:
        """Its last signs of life."""
        return read_signs(self._spec.heartbeat)
