"""Tasks on other hosts, as supervision sees them."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlaunch.agent.messages import LOST_HOST, Exit, Order
from distlaunch.agent.output import LINES_AT_ONCE, LINES_PER_S, MAX_LINE_BYTES, Allowance
from distlaunch.agent.remote import file_transfer, task_files
from distlaunch.agent.remote.file_transfer import Incoming
from distlaunch.agent.remote.frames import Frame, FrameError, encode
from distlaunch.base.liveness import Liveness
from distlaunch.engines.remote.link import Link
from distlaunch.engines.remote.path_watch import PathWatch
from distlaunch.engines.remote.replies import parse_liveness
from distlaunch.plan.train import LaunchPlan, TaskPlan

_LOST_CODE = -9
"""Exit code of a task whose host is lost. The agent there ends the task after a long silence of the controller."""
_CHECK_INTERVAL_S = 0.25
_NOTE_AFTER_S = 2.0


@dataclass
class RemoteTask:
    """A process of a task on another host. The I/O thread updates its fields."""

    host: str
    link: Link
    name: str
    pid: int = 0
    exit: Exit | None = None
    last_liveness: Liveness = field(default_factory=Liveness)
    suspended: bool = False

    def poll(self) -> Exit | None:
        if self.exit is None and self.link.lost:
            self.exit = Exit(_LOST_CODE, oom=False, lost=f"{LOST_HOST}{self.host} was lost: {self.link.lost}")
        return self.exit

    def send(self, order: Order, *, whole_group: bool) -> None:
        self.link.post("order", task=self.name, order=order.value, whole_group=whole_group)

    def is_suspended(self) -> bool:
        return self.suspended

    def liveness(self) -> Liveness:
        return self.last_liveness


@dataclass
class _SenderLimits:
    """Limits on the messages of a host in an attempt.

    Attributes:
        forbidden: folders of the tasks of other hosts and, if the chief is on another host, the files that only the
            chief writes.
        allowance: limits output lines to twice the amount that an agent allows its tasks.
        num_files: number of files that have been received.
        num_hidden: number of lines that were not shown since the last shown line.
    """

    forbidden: frozenset[str]
    allowance: Allowance
    num_files: int = 0
    num_hidden: int = 0

    @staticmethod
    def of(plan: LaunchPlan, host: str) -> _SenderLimits:
        tasks = [task for task in plan.tasks if task.host == host]
        forbidden = {task.files.path.name for task in plan.tasks if task.host != host}
        if all(task.task != plan.lead for task in tasks):
            forbidden |= {plan.events.name, *task_files.OF_CHIEF}
        number = 2 * (len(tasks) + 1)
        allowance = Allowance(time.monotonic(), per_s=LINES_PER_S * number, at_once=LINES_AT_ONCE * number)
        return _SenderLimits(frozenset(forbidden), allowance)


class RemoteTasks:
    """Starts tasks on hosts and handles the messages about them.

    Args:
        show: called with the lines that tasks print, in the thread that calls `wait`.
        environ: variables for the tasks, in addition to their host's environment.
        paths: watches whether the hosts still reach each other.
        note_host_failure: called with the name of a host whose tasks are ended because other hosts cannot reach it.
        copies: the hosts that have a copy of the run directory.
    """

    def __init__(
        self, plan: LaunchPlan, links: Mapping[str, Link], incoming: Incoming, show: Callable[[str, str], None],
        environ: Mapping[str, str],
        paths: PathWatch,
        note_host_failure: Callable[[str], None],
        copies: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._copies = tuple(copies)
        self._plan, self._links, self._incoming = plan, links, incoming
        self._show, self._environ, self._paths, self._note_host_failure = show, environ, paths, note_host_failure
        self._tasks: dict[str, RemoteTask] = {}
        self._senders: dict[str, _SenderLimits] = {}
        self._lines: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()
        self._is_collected = False
        self._has_ended = threading.Event()  # set if a task has ended and `wait` has not yet returned because of it
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_woken = False
        # not `select`, which does not support descriptors above 1,023
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def start(self, task: TaskPlan) -> RemoteTask:
        link = self._links[task.host]
        name = str(task.task)
        made = RemoteTask(task.host, link, name)
        with self._lock:
            self._tasks[name] = made
        for log in (task.files.stdout_log, task.files.stderr_log):
            with contextlib.suppress(OSError):  # a full disk
                log.touch()
        fields: dict[str, Any] = {
            "task": name,
            "attempt": self._plan.attempt,
            "argv": list(task.argv),
            "env": {**self._environ, **task.env},
            "preload": task.preload._asdict() if task.preload is not None else None,
            "cores": sorted(task.cores),
        }
        link.post_in_order([encode("start", **fields)])
        return made

    def collect(self, gives_up: Callable[[], bool]) -> None:
        """Collect the files of all hosts and end tasks that still run. Only the first call has an effect."""
        if self._is_collected:
            return
        self._is_collected = True
        pending = {link.request("end"): link for link in self._links.values()}
        left, waited_s = set(pending), 0.0
        # no limit is needed: a host that does not answer is marked as lost, which ends the wait
        while left := wait(left, timeout=_CHECK_INTERVAL_S).not_done:
            waited_s += _CHECK_INTERVAL_S
            names = ", ".join(pending[answer].name for answer in pending if answer in left)
            if waited_s == _NOTE_AFTER_S:
                self._show("", f"waiting for the last files of {names}; press Ctrl-C to leave them there")
            if gives_up():
                self._show("", f"the last files of {names} were not copied; they stay in the run directory there")
                for answer in left:
                    pending[answer].keeps_copies = True
                break
        for answer, link in pending.items():
            if answer not in left and answer.exception() is None:
                self._note_unsent(link, answer.result().text("unsent"))

    def _note_unsent(self, link: Link, unsent: str) -> None:
        """Keep the copy of a host that could not send some files, and show their names."""
        if unsent:
            link.keeps_copies = True
            cut = f"{unsent[:MAX_LINE_BYTES]} ..." if len(unsent) > MAX_LINE_BYTES else unsent
            self._show("", f"warning: {link.name}: could not be sent: {cut}; they stay in {self._plan.run_dir} there")

    def send_file(self, path: Path) -> None:
        name = path.relative_to(self._plan.run_dir).as_posix()
        for host in self._copies:
            self._links[host].post_in_order(file_transfer.send_file(path, name))

    def watch(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> bool:
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._is_woken = False  # reset it before handling lines: later ones wake this thread again
        while self._lines:
            self._show(*self._lines.popleft())
        if (given_up := self._paths.check(self._progress())) is not None:
            self._give_up(*given_up)
        if self._has_ended.is_set():
            self._has_ended.clear()
            return True
        return bool(ready - {self._wake_read})

    def take(self, link: Link, frame: Frame) -> None:
        """Handle a message of an agent; called by the I/O thread."""
        if frame.kind in file_transfer.KINDS:
            self._take_file(link, frame)
        elif frame.kind == "line":
            self._take_line(link, frame)
            self.wake()
        elif frame.kind == "beat":
            self._note_beat(frame)
        elif frame.kind == "exit":
            self._note_exit(frame)

    def _take_file(self, link: Link, frame: Frame) -> None:
        sender = self._sender(link.name)
        task_files.check(frame, self._plan.attempt, sender.forbidden)
        # a host must not choose the permissions of files on this machine
        frame.fields.pop("mode", None)
        if frame.kind == file_transfer.MOVE:
            sender.num_files += 1
            if sender.num_files > task_files.MAX_FILES:
                raise FrameError(f"more than {task_files.MAX_FILES:,} files")
        self._incoming.take(frame)

    def _sender(self, host: str) -> _SenderLimits:
        if host not in self._senders:
            self._senders[host] = _SenderLimits.of(self._plan, host)
        return self._senders[host]

    def _take_line(self, link: Link, frame: Frame) -> None:
        """Show a line, unless the host sends more lines than agents do."""
        sender, name = self._sender(link.name), frame.text("task")
        if not sender.allowance.take(time.monotonic()):
            sender.num_hidden += 1
            return
        self._note_hidden(link.name, sender)
        text = frame.text("text")
        cut = f"{text[:MAX_LINE_BYTES]} ..." if len(text) > MAX_LINE_BYTES + len(" ...") else text
        self._lines.append((name if name in self._tasks else link.name, cut))

    def _note_hidden(self, host: str, sender: _SenderLimits) -> None:
        if sender.num_hidden:
            self._lines.append((host, f"... {sender.num_hidden:,} lines of this host are not shown"))
            sender.num_hidden = 0

    def note_end(self) -> None:
        """Record the end of a task, or the loss of a host and its tasks; called by any thread."""
        self._has_ended.set()
        self.wake()

    def wake(self) -> None:
        """Make `wait` return."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"+")

    def _progress(self) -> Any:
        """Return a value that changes with each step; None before the first step and while no step is expected."""
        with self._lock:
            running = [task.last_liveness for task in self._tasks.values() if task.exit is None]
        if all(liveness.step is None for liveness in running) or any(liveness.has_to_finish for liveness in running):
            return None
        return [(liveness.calls, liveness.step) for liveness in running]

    def _give_up(self, host: str, reason: str) -> None:
        """End the tasks of a host that others cannot reach."""
        self._note_host_failure(host)
        with self._lock:
            for task in self._tasks.values():
                if task.host == host and task.exit is None:
                    task.send(Order.KILL, whole_group=False)
                    task.exit = Exit(_LOST_CODE, oom=False, lost=reason)

    def close(self) -> None:
        for name, sender in self._senders.items():
            self._note_hidden(name, sender)
        while self._lines:
            self._show(*self._lines.popleft())
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _note_beat(self, frame: Frame) -> None:
        suspended: Sequence[str] = frame.fields.get("suspended") or ()
        with self._lock:
            beats: dict[str, Any] = frame.fields.get("liveness") or {}
            for name, liveness in beats.items():
                if (task := self._tasks.get(name)) is not None:
                    task.last_liveness = parse_liveness(liveness)
                    task.suspended = name in suspended
                    task.pid = int(frame.fields["pids"].get(name, 0))

    def _note_exit(self, frame: Frame) -> None:
        oom = frame.fields.get("oom")
        with self._lock:
            task = self._tasks.get(frame.text("task"))
        if task is None:
            return
        if reason := frame.fields.get("unstartable"):
            self._lines.append((task.name, f"could not be started: {reason}"))
        if isinstance(liveness := frame.fields.get("liveness"), list):
            task.last_liveness = parse_liveness(liveness)
        task.exit = task.exit or Exit(frame.number("code"), None if oom is None else bool(oom))
        self.note_end()
