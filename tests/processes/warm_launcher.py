"""Launchers that are forked with the warm process of their tasks, so that a test waits for no import."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.process import Child, Lifeline
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.tasks import preload

_RUNS = "tests.processes.forked_launcher"


class Forked(subprocess.Popen[str]):
    """A child that something else than Popen has started, in its clothes."""

    def __init__(self, pid: int, stdout: io.RawIOBase | None = None, stderr: io.RawIOBase | None = None) -> None:
        self.pid, self.returncode, self.args = pid, None, [_RUNS]
        self.stdin, self.stdout, self.stderr = None, _text(stdout), _text(stderr)
        self.text_mode, self.universal_newlines, self.encoding, self.errors = True, True, None, None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.25


def _text(raw: io.RawIOBase | None) -> io.TextIOWrapper | None:
    return None if raw is None else io.TextIOWrapper(io.BufferedReader(raw))


class Launchers:
    """Starts launchers from the processes of a pool; when it is left, all of them are gone."""

    def __init__(self, pool: WarmStarts) -> None:
        self._pool = pool
        self._exit = contextlib.ExitStack()
        self._lifeline = self._exit.enter_context(Lifeline())
        self._children: list[Child] = []

    def start(self, what: Preload, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Forked | None:
        """The command with these words; None: it must be started fresh."""
        nowhere = Path(os.devnull)
        argv = (sys.executable, *SAFE_MODULE, _RUNS, " ".join(what.arguments), *words)
        spec = TaskSpec("", argv, env, *[nowhere] * 3, what)
        process = self._pool.process_for(spec)
        if process is None or not process.is_ready(60) or process.unfit:
            return None
        before = os.getcwd()
        os.chdir(cwd)
        try:
            child = process.fork(spec, self._lifeline)
        finally:
            os.chdir(before)
        self._children.append(child)
        return Forked(child.pid, child.stdout, child.stderr)

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self._exit.close()


def main(arguments: Sequence[str]) -> str:
    """Preloads what launchers and their tasks import."""
    import distlaunch.cli.main  # noqa: F401
    import distlaunch.cli.train  # noqa: F401
    import distlaunch.jobs.job  # noqa: F401
    import distlaunch.jobs.smoke  # noqa: F401
    import distlaunch.ui.progress.view  # noqa: F401

    return preload.main(arguments)
