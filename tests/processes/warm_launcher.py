"""Launchers that are forked with the warm process of their tasks, so that a test waits for no import."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.process import Lifeline
from distlaunch.agent.warm_starts import WarmProcess, WarmStarts
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.tasks import preload

_RUNS = "tests.processes.forked_launcher"
_COMMAND = "tests.processes.forked_command"


class Forked(subprocess.Popen[str]):
    """A child that was not started by Popen, with the interface of Popen."""

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
        self._pids: set[int] = set()

    def start(self, what: Preload, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Forked | None:
        """The command with these words; None: it must be started fresh."""
        nowhere = Path(os.devnull)
        argv = (sys.executable, *SAFE_MODULE, _RUNS, " ".join(what.arguments), *words)
        spec = TaskSpec("", argv, env, *[nowhere] * 3, what)
        process = self._pool.process_for(spec)
        if process is None or not process.is_ready(60) or process.unfit:
            return None
        return self._fork(process, spec, cwd)

    @functools.cached_property
    def commands(self) -> WarmProcess:
        """The process that commands are forked from."""
        process = WarmProcess.spawn(sys.executable, Preload("tests.processes.warm_launcher"), os.environ)
        self._exit.callback(process.close)
        assert process.is_ready(60), "the modules of the command take more than a minute to import"
        return process

    def start_command(self, module: str, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Forked:
        """Start a command with any environment that Python reads nothing of; it starts its tasks as usual.

        `supervised.processes_of` finds it by its current directory, among the words that `ps` shows.
        """
        argv = (sys.executable, *SAFE_MODULE, _COMMAND, module, str(cwd), *words)
        spec = TaskSpec("", argv, env, *[Path(os.devnull)] * 3)
        return self._fork(self.commands, spec, cwd)

    def _fork(self, process: WarmProcess, spec: TaskSpec, cwd: Path) -> Forked:
        before = os.getcwd()
        os.chdir(cwd)
        try:
            child = process.fork(spec, self._lifeline)
        finally:
            os.chdir(before)
        self._pids.add(child.pid)
        return Forked(child.pid, child.stdout, child.stderr)

    def close(self) -> None:
        for child in psutil.Process().children():
            if child.pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        self._exit.close()


def main(arguments: Sequence[str]) -> str:
    """Import what launchers import, and with a backend as the first argument what their tasks do."""
    for name in (
        "cli.logs",
        "cli.main",
        "cli.run",
        "cli.stop",
        "cli.train",
        "jobs.job",
        "jobs.smoke",
        "ui.progress.view",
    ):
        importlib.import_module(f"distlaunch.{name}")
    return preload.main(arguments) if arguments else ""
