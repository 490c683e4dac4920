"""Helper processes of forked launchers are forked like tasks, except helpers that must be clean, which start fresh."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import yaml

from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.process import Lifeline
from distlaunch.agent.warm_starts import WarmProcess
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.config.strategies import MODELS
from tests.processes.warm_launcher import Forked

DESCRIBE, PREDICT = "distlaunch.tasks.describe", "distlaunch.tasks.predict_export"


class ForkedHelpers:
    """Stands for `subprocess` in the module that asks helpers.

    Args:
        process: what is forked.
        what: it has imported.
    """

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, process: WarmProcess, what: Preload) -> None:
        self._process, self._what = process, what

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes] | None,
        stderr: IO[bytes],
        timeout: float | None,
    ) -> subprocess.CompletedProcess[bytes]:
        if _backend(command) != self._what.arguments[0]:
            return subprocess.run(
                command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, timeout=timeout, check=False
            )
        spec = TaskSpec("", tuple(command), dict(env), *[Path(os.devnull)] * 3, self._what)
        with Lifeline() as lifeline:
            child = self._process.fork(spec, lifeline)
            helper = Forked(child.pid, child.stdout, child.stderr)
            try:
                out, err = helper.communicate(timeout=timeout)
            finally:
                if helper.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    helper.wait()
        sys.stdout.flush()
        with open(1, "wb", closefd=False) if stdout is None else contextlib.nullcontext(stdout) as file:
            file.write(out.encode())
        stderr.write(err.encode())
        return subprocess.CompletedProcess(command, helper.returncode)


def _backend(command: Sequence[str]) -> str | None:
    """Return the backend that a helper imports; None if the helper must be a fresh process."""
    _, *options, module = command[:4]
    words = command[4:]
    if tuple(options) != SAFE_MODULE or module not in (DESCRIBE, PREDICT):
        return None
    if module == PREDICT:
        return "tensorflow"
    return MODELS[yaml.safe_load(Path(words[1]).read_text())["strategy"]["kind"]].backend
