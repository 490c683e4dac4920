"""Starts the real `distlaunch` command with real TensorFlow workers, and looks at what it leaves."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from supervised import REPOSITORY, processes_of, wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, StepsDone
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import INJECTED
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables
from distlaunch.config.strategies import MODELS
from tests import warm
from tests.conftest import is_cold
from tests.processes.warm_launcher import Launchers

CONFIGS = Path(REPOSITORY) / "configs"
LIMIT_S = 180.0
_TAKES_OVERRIDES = ("train", "verify", "evaluate", "predict", "export")


@functools.cache
def launchers() -> Launchers:
    """Return the launchers of this test session."""
    made = Launchers(warm.pool())
    atexit.register(made.close)
    return made


def _backend(words: Sequence[str], cwd: Path) -> str:
    """Guess the backend of the tasks from command, config or run; a wrong guess only costs the time of an import."""
    targets = [cwd / word for word in words[1:2]]
    files = [path if path.is_file() else RunDir(path).config for path in targets if path.exists()]
    text = " ".join([*words, *(file.read_text() for file in files if file.suffix == ".yaml" and file.is_file())])
    kind = next(filter(MODELS.get, re.findall(r'kind"?[:=] ?"?(\w+)', text)), "one_device")
    return MODELS[kind].backend


def _sets_other_settings() -> bool:
    """Return whether a test has set a variable to another value than launchers choose by themselves."""
    decided = kept_variables(Machine({}).hardware)
    return any(os.environ.get(name, value) != value for name, value in decided.items())


def start(*words: str, cwd: Path, path: Sequence[Path] = ()) -> subprocess.Popen[str]:
    """Start the command in the background without a terminal; packages in `path` take precedence over installed ones.

    It is forked, and so are its tasks, from processes that have imported their frameworks; with `pytest --cold`, all of
    them are fresh.
    """
    if is_cold():
        words = (*words, *(("--set", "engine.warm_start=false") if words[0] in _TAKES_OVERRIDES else ()))
    elif not path and INJECTED not in os.environ and not _sets_other_settings():
        forked = launchers().start(warm.preload(_backend(words, cwd)), words, cwd, warm.environment())
        if forked is not None:
            return forked
    return subprocess.Popen(
        [sys.executable, "-m", "distlaunch", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), REPOSITORY])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, out, err


def run(*words: str, cwd: Path, path: Sequence[Path] = (), limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    return finish(start(*words, cwd=cwd, path=path), limit_s)


def wait_for(run_dir: RunDir, condition: Callable[[list[Event]], bool]) -> None:
    """Until the run's events fulfil a condition."""
    wait_until(lambda: condition(read_events(run_dir.events)), timeout_s=LIMIT_S)


def at_step(number: int) -> Callable[[list[Event]], bool]:
    return lambda events: any(isinstance(event, StepsDone) and event.step >= number for event in events)


def final_state(run_dir: RunDir) -> dict[str, np.ndarray]:
    """The newest checkpoint's arrays by name, without the metrics."""
    from distlaunch.checkpoints.store import CheckpointStore

    saved = CheckpointStore(run_dir.checkpoints).newest_good()
    assert saved is not None
    return {name: value for name, value in saved.state.items() if not name.startswith(("metric/", "log/"))}


def assert_nothing_left(run_dir: RunDir) -> None:
    wait_until(lambda: not processes_of(run_dir.path), timeout_s=10)


def kill_task(run_dir: RunDir, index: int) -> None:
    """SIGKILL to the process of a worker."""
    from distlaunch.base.events import TaskStarted

    files = [run_dir.events, run_dir.task(run_dir.next_attempt() - 1, f"worker:{index}").events]
    started = [
        event
        for file in files
        for event in read_events(file)
        if isinstance(event, TaskStarted) and event.task == f"worker:{index}"
    ]
    os.kill(started[-1].pid, signal.SIGKILL)


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]
