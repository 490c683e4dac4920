"""A command in a terminal of its own, and what somebody sees and types there."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from supervised import REPOSITORY

LIMIT_S = 40.0
_AGAIN_S = 3.0


class Terminal:
    """`distlaunch WORDS` with a controlling terminal."""

    def __init__(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        argv = [sys.executable, "-m", "distlaunch", *words]
        environ = {**os.environ, "PYTHONPATH": REPOSITORY, "TERM": "dumb", **(env or {})}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(argv[0], argv, environ)
        self.seen = ""
        self._from = 0

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the output since the last call, up to and including the pattern."""
        until = time.monotonic() + LIMIT_S
        while (match := re.compile(pattern).search(self.seen, self._from)) is None:
            assert time.monotonic() < until, f"{pattern} did not come:\n{self.seen}"
            assert self._read(), f"ended without {pattern}:\n{self.seen}"
        self._from = match.end()
        return match

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press_until(self, key: str, pattern: str) -> None:
        """Press a key, and again every 3 s, until the pattern appears.

        CPython's readline shows the prompt before it waits. It notices a signal that arrives in between only at the
        next key (`readline_until_enter_or_signal`), so a user would press Ctrl-C again, too.
        """
        until = time.monotonic() + LIMIT_S
        again = 0.0
        while re.compile(pattern).search(self.seen, self._from) is None:
            now = time.monotonic()
            assert now < until, f"{pattern} did not come:\n{self.seen}"
            if now >= again:
                self.type(key)
                again = now + _AGAIN_S
            if select.select([self._fd], [], [], max(0.0, again - now))[0]:
                assert self._read(), f"ended without {pattern}:\n{self.seen}"
        self.wait_for(pattern)

    def wait(self) -> int:
        """The exit code."""
        while self._read():
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        """Read more of the output and return False at its end."""
        if not select.select([self._fd], [], [], LIMIT_S)[0]:
            raise AssertionError(f"nothing came for {LIMIT_S:g} s:\n{self.seen}")
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: nobody has the other end any more
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
