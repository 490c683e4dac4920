"""Starts the tasks of this host in separate process groups, reads their output, signals them and ends them."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable

from distlaunch.agent.messages import Exit, Order, TaskSpec
from distlaunch.agent.output import LineSink, Pump
from distlaunch.agent.process import Child, Lifeline
from distlaunch.agent.warm_starts import WarmProcess, WarmStartError, WarmStarts
from distlaunch.base.liveness import Liveness, read_liveness
from distlaunch.base.protocol import NOT_FORKED
from distlaunch.base.secret_mask import SecretMask
from distlaunch.cluster.cgroup import oom_kills
from distlaunch.cluster.cores import bind_to_cores

_NO_PROGRAM = 127
"""The exit code of a task whose program cannot be started, as in shells."""


class HostTasks:
    """A context manager that starts tasks on this host, and ends all of them on exit.

    Args:
        show: called with the name of a task and a line that it has printed.
        clock: returns monotonic seconds.
        warm: the warm processes from which tasks are forked; other `HostTasks` may use the same ones.
    """

    def __init__(self, show: LineSink, clock: Callable[[], float], warm: WarmStarts | None = None) -> None:
        self._pump = Pump(show, clock)
        self._warm = WarmStarts() if warm is None else warm
        self._entered = contextlib.ExitStack()
        self._lifeline: Lifeline | None = None
        self._tasks: dict[str, HostTask] = {}
        self._importing: dict[int, tuple[WarmProcess, list[HostTask]]] = {}
        """Tasks that wait for the imports of a warm process, by the descriptor that signals the end of the imports."""
        self._oom_before = oom_kills()

    def __enter__(self) -> HostTasks:
        self._lifeline = Lifeline()
        self._entered.enter_context(self._warm.kept())
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lifeline is not None
        # end the tasks before closing the pump, which reads their last output
        self.end_all()
        self._pump.close()
        self._lifeline.close()
        self._entered.close()

    def start(self, spec: TaskSpec) -> HostTask:
        """Start or restart a task. Raise OSError if its program cannot be started."""
        assert self._lifeline is not None
        task = HostTask(spec, self._pump, self.out_of_memory)
        warm = self._warm.process_for(spec)
        # fork the task at once, or start it as a fresh process
        if warm is None or warm.is_ready():
            task.begin(_start(spec, warm, self._lifeline))
        else:
            if warm.fd not in self._importing:
                self._importing[warm.fd] = warm, []
                self._pump.watch(warm.fd)
            # `wait` starts the task after the imports
            self._importing[warm.fd][1].append(task)
        self._tasks[spec.name] = task
        return task

    def end_all(self) -> None:
        """Kill all tasks and read their remaining output."""
        for task in self._tasks.values():
            task.kill()

    def watch(self, fd: int, *, writing: bool = False) -> None:
        """Make `wait` also return when the caller can read from this descriptor, or write to it."""
        self._pump.watch(fd, writing=writing)

    def unwatch(self, fd: int) -> None:
        self._pump.unwatch(fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait for output and read a bounded part of it; return True if a watched descriptor is ready."""
        ready = self._pump.turn(timeout_s)
        imported = ready & self._importing.keys()
        for fd in imported:
            warm, tasks = self._importing.pop(fd)
            # the warm process reports the end of its imports only once, so start all tasks that wait for it
            self._pump.unwatch(fd)
            warm.is_ready()
            for task in tasks:
                self._start_late(task, warm)
        return bool(ready - imported)

    def _start_late(self, task: HostTask, warm: WarmProcess) -> None:
        assert self._lifeline is not None
        if task.poll() is not None:  # the task was stopped in the meantime
            return
        try:
            task.begin(_start(task.spec, warm, self._lifeline))
        except OSError:
            # too late to raise the error to the caller of `start`, which has already returned
            task.give_up(_NO_PROGRAM)

    def out_of_memory(self) -> bool | None:
        """Return True if the kernel's OOM killer has ended a process since this object was made; None if unknown."""
        now = oom_kills()
        # the counter of the cgroup only grows, so compare it with its value at the start
        return None if self._oom_before is None or now is None else now > self._oom_before


def _start(spec: TaskSpec, warm: WarmProcess | None, lifeline: Lifeline) -> Child:
    """Start the process of a task, bound to its cores."""
    child = _child(spec, warm, lifeline)
    bind_to_cores(child.pid, spec.cores)
    return child


def _child(spec: TaskSpec, warm: WarmProcess | None, lifeline: Lifeline) -> Child:
    """Return a forked process if possible, else a fresh one."""
    if warm is not None and not warm.unfit:
        try:
            return warm.fork(spec, lifeline)
        except WarmStartError:
            # start a fresh process instead, which only takes longer
            pass
    reason = "" if warm is None or warm.was_fit else warm.unfit
    return Child.spawn(spec.argv, {**spec.env, NOT_FORKED: reason} if reason else spec.env, lifeline)


class HostTask:
    """A task of this host. If it is forked from a warm process, it has no process before the imports are done."""

    def __init__(self, spec: TaskSpec, pump: Pump, out_of_memory: Callable[[], bool | None]) -> None:
        self.spec, self._pump, self._out_of_memory = spec, pump, out_of_memory
        self.host = socket.gethostname()
        self._child: Child | None = None
        self._given_up: int | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return 0 if self._child is None else self._child.pid

    def begin(self, child: Child) -> None:
        """Attach the process of the task."""
        self._child = child
        for pipe, log in ((child.stdout, self.spec.stdout_log), (child.stderr, self.spec.stderr_log)):
            self._pump.add(self.spec.name, pipe, log, SecretMask(self.spec.env))

    def give_up(self, code: int) -> None:
        """Record this exit code for a task that never gets a process."""
        self._given_up = code

    def poll(self) -> Exit | None:
        """Return how the task ended, or None before its end.

        When this returns an end, all output of the task has been read, and its process group is gone.
        """
        code = self._given_up if self._child is None else self._child.poll()
        if code is None:
            return None
        if self._child is not None:
            self._pump.finish(self.spec.name)
        return Exit(code, self._out_of_memory())

    def kill(self) -> None:
        """Kill the task and its child processes, and read its remaining output."""
        if self._child is None:
            self.give_up(-signal.SIGKILL)
        else:
            self._child.kill()
            self._pump.finish(self.spec.name)

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Send an order to the task.

        Args:
            whole_group: whether to send a stop signal to the child processes, too. A task may need them for a clean
                end.
        """
        if self._child is None:
            if order is not Order.DUMP:
                # report the same exit code as if the signal had ended a process
                self.give_up(-(signal.SIGKILL if order is Order.KILL else signal.SIGTERM))
        elif order is Order.DUMP:
            self._child.dump_stacks()
        elif order is Order.KILL:
            self._child.send(signal.SIGKILL)
        else:
            self._child.send(signal.SIGTERM, leader_only=not whole_group)

    def is_suspended(self) -> bool:
        """Return True if the process is suspended, as by SIGSTOP."""
        return self._child is not None and self._child.is_suspended()

    def liveness(self) -> Liveness:
        """Return the latest liveness of the task."""
        return read_liveness(self.spec.heartbeat)
