"""The tasks of this host: started in groups of their own, read, signalled, and never left behind."""

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
from distlaunch.base.secret_mask import SecretMask
from distlaunch.cluster.cgroup import oom_kills
from distlaunch.cluster.cores import bind

_NO_PROGRAM = 127
"""The exit code of a task whose program cannot be started, as a shell has it."""


class HostTasks:
    """Starts tasks on this host while it is entered; when it is left, all of them are gone.

    Args:
        show: takes the lines that tasks print.
        clock: monotonic seconds.
        warm: where tasks are forked from; others may use it at the same time.
    """

    def __init__(self, show: LineSink, clock: Callable[[], float], warm: WarmStarts | None = None) -> None:
        self._pump = Pump(show, clock)
        self._warm = WarmStarts() if warm is None else warm
        self._entered = contextlib.ExitStack()
        self._lifeline: Lifeline | None = None
        self._tasks: dict[str, HostTask] = {}
        self._importing: dict[int, tuple[WarmProcess, list[HostTask]]] = {}
        """Tasks that cannot be forked yet, by the descriptor that signals when they can."""
        self._oom_before = oom_kills()

    def __enter__(self) -> HostTasks:
        self._lifeline = Lifeline()
        self._entered.enter_context(self._warm.kept())
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lifeline is not None
        # before the pump is closed, which still takes what they print
        self.end_all()
        self._pump.close()
        self._lifeline.close()
        self._entered.close()

    def start(self, spec: TaskSpec) -> HostTask:
        """Start or restart a task. Raise OSError if its program cannot be started."""
        assert self._lifeline is not None
        task = HostTask(spec, self._pump, self.out_of_memory)
        warm = self._warm.process_for(spec)
        # nothing to wait for: forked at once, or started as a fresh process
        if warm is None or warm.is_ready():
            task.begin(_start(spec, warm, self._lifeline))
        else:
            if warm.fd not in self._importing:
                self._importing[warm.fd] = warm, []
                self._pump.watch(warm.fd)
            # started by `wait`, when the process has imported
            self._importing[warm.fd][1].append(task)
        self._tasks[spec.name] = task
        return task

    def end_all(self) -> None:
        """Kill all tasks and read their remaining output."""
        for task in self._tasks.values():
            task.kill()

    def watch(self, fd: int, *, writing: bool = False) -> None:
        """Make `wait` also return when this descriptor can be read, or written, which the caller does."""
        self._pump.watch(fd, writing=writing)

    def unwatch(self, fd: int) -> None:
        self._pump.unwatch(fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait for output and read a bounded part of it; return True if the watched descriptor can be read."""
        ready = self._pump.turn(timeout_s)
        imported = ready & self._importing.keys()
        for fd in imported:
            warm, tasks = self._importing.pop(fd)
            # one answer serves all tasks that wait for it
            self._pump.unwatch(fd)
            warm.is_ready()
            for task in tasks:
                self._start_late(task, warm)
        return bool(ready - imported)

    def _start_late(self, task: HostTask, warm: WarmProcess) -> None:
        assert self._lifeline is not None
        if task.poll() is not None:  # it is not wanted any more
            return
        try:
            task.begin(_start(task.spec, warm, self._lifeline))
        except OSError:
            # nobody is left to raise to: `start` has returned long ago
            task.give_up(_NO_PROGRAM)

    def out_of_memory(self) -> bool | None:
        """Return True if the kernel has killed for lack of memory since this was made; None if unknown."""
        now = oom_kills()
        # the counter is of the whole cgroup and never falls: only its growth says something
        return None if self._oom_before is None or now is None else now > self._oom_before


def _start(spec: TaskSpec, warm: WarmProcess | None, lifeline: Lifeline) -> Child:
    """Start the process of a task, bound to its cores."""
    child = _child(spec, warm, lifeline)
    bind(child.pid, spec.cores)
    return child


def _child(spec: TaskSpec, warm: WarmProcess | None, lifeline: Lifeline) -> Child:
    """Return a forked process if possible, else a fresh one."""
    if warm is not None and not warm.unfit:
        try:
            return warm.fork(spec, lifeline)
        except WarmStartError:
            # a fresh process takes its place, which costs the time of the imports and nothing else
            pass
    return Child.spawn(spec.argv, spec.env, lifeline)


class HostTask:
    """A task of this host. It has no process while what it is forked from still imports."""

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
        """Return how the task ended, or None. Its output has then been read, and its process group has ended."""
        code = self._given_up if self._child is None else self._child.poll()
        if code is None:
            return None
        if self._child is not None:
            self._pump.finish(self.spec.name)
        return Exit(code, self._out_of_memory())

    def kill(self) -> None:
        """Kill the task with everything that it has started, and read its remaining output."""
        if self._child is None:
            self.give_up(-signal.SIGKILL)
        else:
            self._child.kill()
            self._pump.finish(self.spec.name)

    def send(self, order: Order, *, whole_group: bool) -> None:
        """Send an order to the task.

        Args:
            whole_group: also ask what the task has started to stop; a task may need its own children to end well.
        """
        if self._child is None:
            if order is not Order.DUMP:
                # it ends as if the signal had reached a process
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
