"""Warm processes: they have imported the framework, and tasks are forked from them.

Measured with TensorFlow 2.21: importing takes 2.3 s of CPU, a fork a hundredth of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.process import Child, Lifeline
from distlaunch.agent.warm_process import PADDING
from distlaunch.base.protocol import LIFELINE_FD, SAFE_MODULE
from distlaunch.base.socket_messages import receive_message, send_message

_FORK_S = 15.0  # time for an answer, although a fork takes hundredths of a second
_END_S = 2.0  # time for the process to end after its socket was closed
_subreaper_lock = threading.Lock()
"""Held while this process is a subreaper, since only one thread at a time may change that."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


class WarmStartError(Exception):
    """A task cannot be forked. No process of the task is left."""


class WarmProcess:
    """A process that imports modules and then forks tasks.

    Args:
        connection: the socket for requests.
        process: the process, a child of this process.

    Attributes:
        unfit: why no task can be forked; empty if tasks can be forked, and None while the process still imports.
        was_fit: whether tasks could be forked at some time.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[Any]) -> None:
        self._connection, self._process = connection, process
        self._lock = threading.RLock()
        self.unfit: str | None = None
        self.was_fit = False

    @staticmethod
    def spawn(interpreter: str, preload: Preload, env: Mapping[str, str]) -> WarmProcess:
        """Start a warm process. Raise OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), preload.module, *preload.arguments, PADDING]
        with theirs:
            process = subprocess.Popen(
                [interpreter, *SAFE_MODULE, "distlaunch.agent.warm_process", *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        return WarmProcess(ours, process)

    @property
    def fd(self) -> int:
        """Return the descriptor that becomes readable when the imports are done or the process has ended."""
        return self._connection.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return True if the imports are done or have failed."""
        with self._lock:
            if self.unfit is None and select.select([self._connection], [], [], timeout_s)[0]:
                self._read_answer()
            return self.unfit is not None

    def fork(self, spec: TaskSpec, lifeline: Lifeline) -> Child:
        """Start a task as a child of this process. Raise WarmStartError if that fails; no task is left then."""
        out, err, gate = os.pipe(), os.pipe(), os.pipe()
        try:
            # be the subreaper only now: otherwise the orphaned children of all tasks would become children of this
            # process
            with self._lock, _subreaper():
                pid = self._request_fork(spec, (out[1], err[1], lifeline.read_fd, gate[0]))
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                # reap it here, since no `Child` will
                os.waitpid(pid, 0)
                raise WarmStartError("the task has ended before it began")
            child = Child(pid, os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0), lambda: _reap(pid), lifeline)
        except (OSError, ValueError, WarmStartError) as error:
            for fd in (out[0], err[0]):
                os.close(fd)
            self.close()
            raise WarmStartError(str(error)) from None
        else:
            # let the task begin after `Child` has registered it with the guard, so that it cannot outlive this process
            os.write(gate[1], b"+")
            return child
        finally:  # closing the gate without a byte ends the task
            for fd in (out[1], err[1], *gate):
                os.close(fd)

    def _request_fork(self, spec: TaskSpec, fds: tuple[int, ...]) -> int:
        request = {"argv": spec.argv, "env": dict(spec.env), "cwd": os.getcwd(), "lifeline": LIFELINE_FD}
        self._connection.settimeout(_FORK_S)
        send_message(self._connection, json.dumps(request).encode(), fds)
        answer = self._read_answer()
        if not answer.get("pid"):
            raise WarmStartError(self.unfit or "it could not fork")
        return int(answer["pid"])

    def _read_answer(self) -> dict[str, Any]:
        """Return the next answer, and record whether tasks can be forked."""
        answer: dict[str, Any] = {"unfit": "it has ended"}
        with contextlib.suppress(OSError, EOFError):
            answer = json.loads(receive_message(self._connection)[0])
        self.unfit = answer.get("unfit", "")
        self.was_fit = self.was_fit or not self.unfit
        return answer

    def close(self) -> None:
        """End the warm process. Tasks forked from it continue, since they are not its children."""
        importing = self.unfit is None
        self.unfit = self.unfit or "it has been closed"
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # a process that still imports does not notice the closed socket
            self._process.wait(0 if importing else _END_S)
        self._process.kill()
        self._process.wait()


class _ImportKey(NamedTuple):
    """The key of a warm process: everything that its imports may depend on."""

    interpreter: str
    preload: Preload
    env: frozenset[tuple[str, str]]

    @staticmethod
    def of(interpreter: str, preload: Preload, env: Mapping[str, str]) -> _ImportKey:
        read = {name: value for name, value in env.items() if name not in preload.late_env}
        return _ImportKey(interpreter, preload, frozenset(read.items()))


class WarmStarts:
    """The warm processes of this host, one for each combination of interpreter, imports and environment.

    Several threads may use it at the same time, each for its own tasks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[_ImportKey, WarmProcess] = {}
        self._users = 0

    @contextlib.contextmanager
    def kept(self) -> Generator[WarmStarts]:
        """Keep the processes until all `with` blocks of this context manager have ended."""
        with self._lock:
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                is_over = not self._users
            if is_over:
                for process in self._processes.values():
                    process.close()
                self._processes.clear()

    def add(self, interpreter: str, preload: Preload, env: Mapping[str, str], process: WarmProcess) -> None:
        """Add a process that has imported a preload in this environment."""
        self._processes[_ImportKey.of(interpreter, preload, env)] = process

    def process_for(self, spec: TaskSpec) -> WarmProcess | None:
        """Return the warm process from which to fork a task; None to start a fresh process.

        The warm process may still be importing.
        """
        # only modules of distlaunch, which are started with `-P -m`, are known to begin with these imports
        if spec.preload is None or tuple(spec.argv[1:3]) != SAFE_MODULE or sys.platform != "linux":
            return None
        kind = _ImportKey.of(spec.argv[0], spec.preload, spec.env)
        with self._lock:
            process = self._processes.get(kind)
            # replace a process that could fork tasks but has ended, for example because packages were changed
            if process is None or (process.unfit and process.was_fit):
                with contextlib.suppress(OSError):  # the task is started as a fresh process, which reports the error
                    process = self._processes[kind] = WarmProcess.spawn(spec.argv[0], spec.preload, dict(kind.env))
        return None if process is None or process.unfit else process


@contextlib.contextmanager
def _subreaper() -> Generator[None]:
    """Make orphaned descendants of this process its children within the block."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    with _subreaper_lock:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise WarmStartError("this system has no subreapers")
        try:
            yield
        finally:
            # restore the setting: in a container, the launcher may already be a subreaper
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
