"""A launcher that outlives the terminal: it continues in a process and a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import ExitCode


@dataclass(frozen=True)
class Waiting:
    """The process that the user has started, which stays until the launcher is at work."""

    pid: int
    pipe: int

    def wait(self) -> int | None:
        """Return the exit code of a launcher that ended before its tasks started, or None if it is working."""
        try:
            at_work = os.read(self.pipe, 1) != b""
        except KeyboardInterrupt:  # which the launcher's session does not get
            os.kill(self.pid, signal.SIGTERM)
            return ExitCode.PREEMPTED
        finally:
            os.close(self.pipe)
        if at_work:
            return None
        # no byte came: the pipe was closed by its end
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else ExitCode.FAILED


class Daemon:
    """The launcher's process. Until `settle` it writes to the terminal, so that what keeps it from starting is seen."""

    def __init__(self, pipe: int, log: Path) -> None:
        self._pipe: int | None = pipe
        self._log = log

    def settle(self) -> None:
        """Redirect output to the log and give the terminal back to the user, just before the tasks start."""
        if self._pipe is None:
            return
        # before the descriptor changes: what was printed until now is for the terminal
        sys.stdout.flush()
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for standard in (1, 2):
            os.dup2(fd, standard)
        os.close(fd)
        with contextlib.suppress(BrokenPipeError):  # the terminal was closed meanwhile, and nobody waits any more
            os.write(self._pipe, b"1")
        os.close(self._pipe)
        self._pipe = None


def leave(log: Path) -> Waiting | Daemon:
    """Fork into a process that waits for the start and the launcher; both return from this call."""
    # else both processes would write what is still in the buffer
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Waiting(pid, reading)
    os.close(reading)
    os.setsid()  # a session without a terminal: closing the window sends it nothing
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # a shell starts background jobs with Ctrl-C ignored, by which `stop --now` ends a job
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(fd, 0)
    os.close(fd)
    return Daemon(writing, log)
