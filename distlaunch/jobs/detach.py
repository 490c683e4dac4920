"""A launcher that outlives its terminal: it runs in a new process and session."""

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
    """The process that the user has started. It waits until the launcher starts its tasks."""

    pid: int
    pipe: int

    def wait(self) -> int | None:
        """Return the exit code of a launcher that ended before its tasks started, or None if they start."""
        try:
            is_starting = os.read(self.pipe, 1) != b""
        except KeyboardInterrupt:  # Ctrl-C does not reach the launcher's session
            os.kill(self.pid, signal.SIGTERM)
            return ExitCode.PREEMPTED
        finally:
            os.close(self.pipe)
        if is_starting:
            return None
        # no byte came: the launcher has ended, which closed the pipe
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else ExitCode.FAILED


class Daemon:
    """The launcher's process. It writes to the terminal until `settle`, so that the user sees errors before that."""

    def __init__(self, pipe: int, log: Path) -> None:
        self._pipe: int | None = pipe
        self._log = log

    def settle(self) -> None:
        """Redirect output to the log and give the terminal back to the user, just before the tasks start."""
        if self._pipe is None:
            return
        # text that was printed until now is for the terminal
        sys.stdout.flush()
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for standard in (1, 2):
            os.dup2(fd, standard)
        os.close(fd)
        with contextlib.suppress(BrokenPipeError):  # the terminal was closed, which ended the waiting process
            os.write(self._pipe, b"1")
        os.close(self._pipe)
        self._pipe = None


def fork_launcher(log: Path) -> Waiting | Daemon:
    """Fork the launcher. This call returns a Waiting in the process of the user, and a Daemon in the launcher.

    Args:
        log: the file to which the launcher writes after `Daemon.settle`.
    """
    # otherwise both processes would write the text that is still in the buffers
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Waiting(pid, reading)
    os.close(reading)
    os.setsid()  # a session without a terminal gets no signal when the window is closed
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # shells start background jobs with SIGINT ignored, but `stop --now` needs it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(fd, 0)
    os.close(fd)
    return Daemon(writing, log)
