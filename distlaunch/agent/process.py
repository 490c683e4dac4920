"""Child processes: each in a group of its own, signalled as a group, and never left behind.

Two things end the children when the launcher itself is killed: the lifeline, a pipe whose end of file signals a child
that the launcher is gone, and the orphan guard, a tiny process that then kills the groups of children that do not watch
it.
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
_GUARD_S = 5.0  # for the guard to end by itself, which takes it milliseconds


class Lifeline:
    """The lifeline of children: pipes whose writing ends this process holds; the kernel closes them at its end."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._guard = subprocess.Popen(
            # isolated and without site: it starts fast, and nothing of the user's is imported
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # out of the terminal's group, whose Ctrl-C is not meant for it
            start_new_session=True,
        )

    def guard(self, group: int) -> None:
        """Make the process group end with this process."""
        self._write_to_guard(f"+{group}\n")

    def release(self, group: int) -> None:
        """Release a group that has ended. Call it before its leader is reaped, while its number is not reused."""
        self._write_to_guard(f"-{group}\n")

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)
        assert self._guard.stdin is not None
        # its end of file: it kills the groups that are still on its list, and none is
        self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_S)
        except subprocess.TimeoutExpired:  # somebody has frozen it, and all groups have ended already
            self._guard.kill()
            self._guard.wait()

    def _write_to_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        # an orphan guard that someone killed is no reason to stop a job: the lifeline is still there
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
        reap: waits for the process, which has ended, and returns its exit code, -N for signal N.
    """

    def __init__(
        self, pid: int, stdout: IO[bytes], stderr: IO[bytes], reap: Callable[[], int], lifeline: Lifeline
    ) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._reap, self._lifeline = reap, lifeline
        self.code: int | None = None
        """The exit code, -N for signal N; None until `poll` has seen the end."""
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
            # unbuffered: the descriptors are polled, and what lies in a buffer does not show there
            bufsize=0,
            # its group has its own number, and Ctrl-C in the terminal reaches the launcher alone
            start_new_session=True,
            # the reading end only: with the writing end a child would keep the others alive
            pass_fds=(lifeline.read_fd,),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        return Child(process.pid, process.stdout, process.stderr, process.wait, lifeline)

    def send(self, number: signal.Signals, *, leader_only: bool = False) -> None:
        """Signal the whole group, or only its leader, which may need its children to exit cleanly."""
        if self.code is None and leader_only:
            os.kill(self.pid, number)
        elif self.code is None:
            self._signal_group(number)

    def poll(self) -> int | None:
        """Return the exit code once the leader has ended, after killing the rest of its group. Does not wait."""
        # WNOWAIT: it stays a zombie, which keeps its number until its group is killed
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
        """Ask the leader to write its stacks to its log; only for a program that handles the signal."""
        if self.code is None:
            os.kill(self.pid, DUMP_SIGNAL)

    def is_suspended(self) -> bool:
        """Return True if the process is suspended, as by SIGSTOP."""
        import psutil  # only where it is needed: it costs 20 ms

        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _bury(self) -> None:
        # The leader is not reaped yet, so its number still means this group and nothing else.
        self._signal_group(signal.SIGKILL)
        self._lifeline.release(self.pid)
        self.code = self._reap()

    def _signal_group(self, number: signal.Signals) -> None:
        # no such group any more, or only processes of another user (setuid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
