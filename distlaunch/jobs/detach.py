"""A launcher that outlives its terminal: it runs in a new process and session."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from distlaunch.base.errors import ExitCode, UsageError
from distlaunch.base.signals import JOB_STOP_SIGNALS
from distlaunch.runs.paths import display_path

_FORWARDED = tuple(number for number in JOB_STOP_SIGNALS if number != signal.SIGHUP)
"""Signals that are meant for the launcher, too; it survives a closed terminal."""


class Waiting:
    """The process that the user has started. It waits until the launcher starts its tasks.

    Attributes:
        pid: process ID of the launcher.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe
        self._is_stopping = self._has_ended = False
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)

    def wait(self) -> int | None:
        """Return the exit code of a launcher that ended before its tasks started, or None if they start.

        A signal to this process is forwarded to the launcher. This call then returns the launcher's exit code.
        """
        is_starting = os.read(self._pipe, 1) != b""
        os.close(self._pipe)
        if is_starting and not self._is_stopping:
            return None
        # without a byte, the launcher has ended, which closed the pipe
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._has_ended = True
        return code if code >= 0 else ExitCode.FAILED

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self._has_ended:
            self._is_stopping = True
            os.kill(self.pid, number)


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
        try:
            fd = _open_log(self._log, os.O_CREAT)
        except OSError as error:  # a full disk: the job goes on, and the waiting process must return
            text = f"warning: {display_path(self._log)}: cannot be written: {error.strerror}; the output is lost"
            print(text, file=sys.stderr, flush=True)
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
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

    Raises:
        UsageError: the log exists and cannot be written.
    """
    try:
        # a new log is created by `settle`, since a directory with a log would not be discarded if nothing starts
        os.close(_open_log(log))
    except FileNotFoundError:
        pass
    except OSError as error:
        advice = "move it away, or allow yourself to write it"
        raise UsageError(
            f"{display_path(log)}: the launcher's log cannot be written: {error.strerror}; {advice}"
        ) from None
    # otherwise both processes would write the text that is still in the buffers
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    # a signal must find the handlers of its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid:
        os.close(writing)
        waiting = Waiting(pid, reading)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return waiting
    os.close(reading)
    os.setsid()  # a session without a terminal gets no signal when the window is closed
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # shells start background jobs with SIGINT ignored, but `stop --now` needs it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(fd, 0)
    os.close(fd)
    return Daemon(writing, log)


def _open_log(path: Path, flags: int = 0) -> int:
    # opening a pipe without a reader fails instead of waiting
    fd = os.open(path, flags | os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    os.set_blocking(fd, True)
    return fd
