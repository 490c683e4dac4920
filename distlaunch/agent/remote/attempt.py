"""The tasks of this host in one attempt, and the messages to the launcher about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distlaunch.agent.host import HostTask, HostTasks
from distlaunch.agent.messages import Exit, Order, Preload, TaskSpec
from distlaunch.agent.open_files import FILES_PER_TASK, allow_open_files
from distlaunch.agent.remote.frames import Frame, FrameError, encode
from distlaunch.agent.remote.outbox import Outbox
from distlaunch.agent.remote.run_copy import RunCopy
from distlaunch.base.errors import UsageError
from distlaunch.base.folders import make_folder
from distlaunch.base.plain_types import fits, is_dict, is_list
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.proxies import direct_paths

_SCAN_S = 0.25
_LEFTOVERS_END_WITHIN_S = 1.0
"""Seconds for leftover processes to end. The launcher gets no messages in this time, so it must be shorter than the
launcher's shortest timeout, 3 s."""
_TAIL_S = 10.0
"""Maximum time in seconds that the report of a task's end waits for the task's last output to be sent."""


class HostAttempt:
    """Starts tasks and follows them.

    Args:
        copy: this host's copy of the run directory; None if the directory is shared with the launcher.
        without: environment variables of this process that tasks do not inherit.
        beat_s: interval in seconds at which the heartbeats of all tasks are sent.
        at_once: names of files that are sent whenever tasks have replaced them; see `RunCopy.replaced`.
    """

    def __init__(
        self,
        run: RunDir,
        number: int,
        copy: RunCopy | None,
        outbox: Outbox,
        clock: Callable[[], float],
        without: list[str],
        beat_s: float,
        at_once: Sequence[str] = (),
    ) -> None:
        self._run, self.number, self._copy, self._outbox, self._clock = run, number, copy, outbox, clock
        self._beat_s, self._at_once = beat_s, at_once
        self._environ = {name: value for name, value in os.environ.items() if name not in without}
        self._tasks: dict[str, HostTask] = {}
        self._started: set[str] = set()
        self._ends: dict[str, tuple[Exit, list[Any], float]] = {}
        self._copying = False
        self._beat_at = self._scan_at = float("-inf")
        if copy is not None:
            copy.begin()
            for path in (run.events, run.reader_events(number)):
                copy.follow(self._name(path), whole_lines=True)

    def start(self, frame: Frame, tasks: HostTasks) -> None:
        """Start or restart a task."""
        name = frame.text("task")
        files = self._run.task(self.number, name)
        try:
            make_folder(files.path)
            files.archive_error()
        except OSError as error:
            self.refuse(name, f"cannot write {files.path}: {error.strerror}")
            return
        if self._copy is not None:
            for log in (files.stdout_log, files.stderr_log):
                self._copy.follow(self._name(log))
            self._copy.follow(self._name(files.events), whole_lines=True)
        argv, env, preload = frame.fields.get("argv"), frame.fields.get("env"), frame.fields.get("preload")
        cores = frame.fields.get("cores")
        if not is_list(argv) or not is_dict(env) or not argv or not is_list(cores) or not fits(cores, list[int]):
            raise FrameError(f"start: {name}: expected a command, an environment and cores")
        environ = {**self._environ, **{str(key): str(value) for key, value in env.items()}}
        environ |= direct_paths(environ)
        spec = TaskSpec(name, tuple(map(str, argv)), environ, files.stdout_log, files.stderr_log, files.heartbeat,
                        _preload(preload), frozenset(cores))  # fmt: skip
        self._started.add(name)
        self._ends.pop(name, None)
        self._tasks.pop(name, None)
        try:
            allow_open_files(FILES_PER_TASK * len(self._started), count(len(self._started), "task"))
            self._tasks[name] = tasks.start(spec)
        except UsageError as error:
            self.refuse(name, str(error))
        except OSError as error:
            self.refuse(name, f"{error.strerror} ({argv[0]})")

    def refuse(self, name: str, why: str) -> None:
        """Report that a task cannot be started."""
        self._outbox.put(encode("exit", task=name, code=127, oom=False, unstartable=why))

    def order(self, frame: Frame) -> bool:
        """Send an order to a task; return False if the task has not been started."""
        name = frame.text("task")
        if (task := self._tasks.get(name)) is not None:
            task.send(Order(frame.text("order")), whole_group=bool(frame.fields.get("whole_group")))
        return task is not None or name in self._started

    def poll(self) -> None:
        """Send new output, heartbeats, checkpoints and ends of tasks."""
        now = self._clock()
        for name, task in list(self._tasks.items()):
            if (end := task.poll()) is not None:
                del self._tasks[name]
                self._ends[name] = end, _plain(task), now
        if self._copy is not None and self._at_once:
            for message in self._copy.replaced(self._at_once):
                self._outbox.put(message)
        if self._ends or now - self._scan_at >= _SCAN_S:
            self._scan_at = now
            quiet = not self._send_appended()
            for name, (end, liveness, since) in list(self._ends.items()):
                if quiet or now - since >= _TAIL_S:
                    self._send_end(name, end, liveness)
            self._send_checkpoints()
        if self._tasks and now - self._beat_at >= self._beat_s:
            self._beat_at = now
            tasks = self._tasks.items()
            liveness, pids = {name: _plain(task) for name, task in tasks}, {name: task.pid for name, task in tasks}
            suspended = [name for name, task in tasks if task.is_suspended()]
            self._outbox.put(encode("beat", liveness=liveness, suspended=suspended, pids=pids))

    @property
    def beats(self) -> bool:
        """Return True if tasks run, so that their heartbeats are sent often."""
        return bool(self._tasks)

    @property
    def is_ending(self) -> bool:
        """Return True if the end of a task has not been reported yet."""
        return bool(self._ends)

    def end_leftover_processes(self) -> str:
        """End the processes that are still running although their tasks have ended.

        Returns:
            A line that names the processes, or an empty string if there are none.
        """
        from distlaunch.agent.leftover_processes import end_leftovers

        if not self._started:
            return ""
        return end_leftovers(str(self._run.path), self.number, self._started, _LEFTOVERS_END_WITHIN_S)

    def close(self, done: Callable[[str], bytes]) -> None:
        """Send the remaining files of the ended tasks, and then a message.

        Args:
            done: returns the message; its argument names the files that could not be sent.
        """
        if self._copy is None:
            self._outbox.put_files([done("")])
            return
        self._copying = True

        def rest(copy: RunCopy) -> Iterator[bytes]:
            while appended := list(copy.appended()):
                yield from appended
            yield from copy.new_checkpoints()
            yield from copy.changed()
            yield done(copy.unsent)

        self._outbox.put_files(rest(self._copy))

    def _send_appended(self) -> bool:
        """Send new data of followed files; return True if there was any, or if the outbox is full."""
        if self._copy is None:
            return False
        if not self._outbox.has_room:
            return True
        found = list(self._copy.appended())
        for message in found:
            self._outbox.put(message)
        return bool(found)

    def _send_checkpoints(self) -> None:
        if self._copy is None or self._copying or not self._copy.has_new_checkpoints:
            return
        self._copying = True

        def copied(copy: RunCopy) -> Iterator[bytes]:
            try:
                yield from copy.new_checkpoints()
            finally:
                self._copying = False

        self._outbox.put_files(copied(self._copy))

    def _send_end(self, name: str, end: Exit, liveness: list[Any]) -> None:
        if self._copy is not None:
            for message in self._copy.replaced([self._name(self._run.task(self.number, name).error_json)]):
                self._outbox.put(message)
        del self._ends[name]
        self._outbox.put(encode("exit", task=name, code=end.code, oom=end.oom, liveness=liveness))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run.path).as_posix()


def _plain(task: HostTask) -> list[Any]:
    """Return the liveness of a task for a message."""
    return list(task.liveness())


def _preload(plain: Any) -> Preload | None:
    if not is_dict(plain):
        return None
    return Preload(str(plain["module"]), tuple(plain["arguments"]), tuple(plain["late_env"]))
