"""A child of this process that was forked and runs a function, instead of a program of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn, cast


class ForkedProcess:
    """A forked child with a pipe to it. `kill` and `wait` work like those of `subprocess.Popen`.

    Attributes:
        pid: its process ID.
        pipe: this process's end of the pipe.
    """

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self._code: int | None = None

    def kill(self) -> None:
        """Kill the child, unless it is known to have ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the child's end; return its exit code, or the negative number of the signal that has ended it."""
        if self._code is None:
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # the user's code has waited for all children, or ignores SIGCHLD
                self._code = 0
        return self._code


def fork(function: Callable[[Connection], None]) -> ForkedProcess:
    """Fork a child that calls a function with its end of a pipe, and ends when the function returns.

    The child inherits no descriptor but the pipe; its standard streams are `/dev/null`.
    """
    # `Pipe` returns connections over sockets, except on Windows, which is not supported
    ours, theirs = cast("tuple[Connection, Connection]", Pipe())
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads, which may hold locks; the caller knows its threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _become(function, theirs)
    theirs.close()
    return ForkedProcess(pid, ours)


def _become(function: Callable[[Connection], None], pipe: Connection) -> NoReturn:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        # a descriptor that stays open here would delay the end of file for its readers
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number > 2 and number != pipe.fileno():
                with contextlib.suppress(OSError):
                    os.close(number)
        # buffered by line, so that no complete line is lost if this process is killed
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, encoding="locale", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="locale", closefd=False)  # noqa: SIM115
        function(pipe)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
