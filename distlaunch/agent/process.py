"""Child processes that end with the launcher, each in a separate process group.

If the launcher is killed, two mechanisms end its children. The lifeline is a pipe that children watch: its end of file
means that the launcher is gone. The orphan guard is a small process that then kills the process groups of all children
that have not ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from distlaunch.base.protocol import LIFELINE_FD
from distlaunch.base.signals import DUMP_SIGNAL

_GUARD = Path(__file__).with_name("orphan_guard.py")
_GUARD_S = 5.0  # time for the guard to end by itself, which usually takes milliseconds


class Lifeline:
    """The lifeline and the orphan guard of children.

    This process holds the writing ends of both pipes. The kernel closes them when this process ends.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._guard = subprocess.Popen(
            # isolated and without site, so that it starts fast and imports no code of the user
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Ctrl-C in the terminal must not reach it
            start_new_session=True,
        )

    def guard(self, group: int) -> None:
        """Make the process group end with this process."""
        self._write_to_guard(f"+{group}\n")

    def release(self, group: int) -> None:
        """Release a group that has ended. Call this before reaping its leader, since that frees the group's number."""
        self._write_to_guard(f"-{group}\n")

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)
        assert self._guard.stdin is not None
        # closing its input ends the guard; all groups have been released
        self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_S)
        except subprocess.TimeoutExpired:  # the guard was suspended from outside
            self._guard.kill()
            self._guard.wait()

    def _write_to_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        # a job continues if the guard was killed from outside, since the lifeline still works
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(line.encode())

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class Child:
    """A child process, leader of its own session and group, with pipes for its output.

    Args:
        reap: waits for the ended process and returns its exit code, or -N for signal N.
    """

    def __init__(
        self, pid: int, stdout: IO[bytes], stderr: IO[bytes], reap: Callable[[], int], lifeline: Lifeline
    ) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._reap, self._lifeline = reap, lifeline
        self.code: int | None = None
        """The exit code, or -N for signal N; None until `poll` has noticed the end."""
        lifeline.guard(pid)

    @staticmethod
    def spawn(argv: Sequence[str], env: Mapping[str, str], lifeline: Lifeline) -> Child:
        """Start a program. Raise OSError if it cannot be started."""
        process = subprocess.Popen(
            list(argv),
            env={**env, LIFELINE_FD: str(lifeline.read_fd)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # unbuffered, since polling a descriptor does not see data in Python's buffer
            bufsize=0,
            # a new group that Ctrl-C in the terminal does not reach
            start_new_session=True,
            # pass only the reading end: with the writing end, a child would keep the lifeline open
            pass_fds=(lifeline.read_fd,),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        return Child(process.pid, process.stdout, process.stderr, process.wait, lifeline)

    def send(self, number: signal.Signals, *, leader_only: bool = False) -> None:
        """Signal the whole group, or only its leader: a leader may need its child processes for a clean end."""
        if self.code is None and leader_only:
            os.kill(self.pid, number)
        elif self.code is None:
            self._signal_group(number)

    def poll(self) -> int | None:
        """Return None while the leader runs. Once it has ended, kill the rest of its group and return its exit code."""
        # WNOWAIT keeps the leader as a zombie, so that its number is not reused before its group is killed
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._bury()
        return self.code

    def kill(self, wait_s: float = 2.0) -> None:
        """Kill the group and wait briefly for its leader, which may be blocked in the kernel."""
        if self.code is None:
            self._signal_group(signal.SIGKILL)
            give_up_at = time.monotonic() + wait_s
            while self.poll() is None and time.monotonic() < give_up_at:
                time.sleep(0.005)

    def dump_stacks(self) -> None:
        """Ask the leader to write its stacks to its log. The program must handle the signal."""
        if self.code is None:
            os.kill(self.pid, DUMP_SIGNAL)

    def is_suspended(self) -> bool:
        """Return True if the process is suspended, as by SIGSTOP."""
        import psutil  # imported here, since it takes 20 ms

        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _bury(self) -> None:
        # the leader is not reaped yet, so its number still belongs to this group
        self._signal_group(signal.SIGKILL)
        self._lifeline.release(self.pid)
        self.code = self._reap()

    def _signal_group(self, number: signal.Signals) -> None:
        # the group has ended, or has only processes of another user (setuid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
