"""Starts the processes that send a run's values to trackers, and waits for them briefly at the end of the run."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import reason_of
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import TrackerName
from distlaunch.runs.paths import display_path
from distlaunch.runs.tracking.outcome import UNLESS_BUSY, SendOutcome
from distlaunch.runs.tracking.trackers import is_installed

_DEADLINE_S = 15.0
"""Time at the end of a run for sending the remaining values."""

_POLL_S = 0.1
"""Interval at which the wait for a tracker checks whether it is to end early."""


@dataclass
class _Started:
    name: TrackerName
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Tracked:
    """How sending a run to a tracker ended: with an outcome or a problem.

    Attributes:
        problem: a message for the user; empty if the process did not fail.
    """

    name: TrackerName
    outcome: SendOutcome | None
    problem: str = ""


@contextlib.contextmanager
def tracking(
    run: RunDir,
    names: Sequence[TrackerName],
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    ends_early: Callable[[], bool] = lambda: False,
) -> Generator[None]:
    """Send the run's values to trackers within the block, as they are reported.

    Args:
        names: the trackers of the config. TensorBoard files are written whenever its package is installed.
        warn: called with a message for each tracker that did not get all values.
        ends_early: called during the wait at the end; returns True to end the wait.
    """
    started: list[_Started] = []
    for name in dict.fromkeys((*names, *(("tensorboard",) if is_installed("tensorboard") else ()))):
        try:
            started.append(_start(name, run, environ))
        except OSError as error:
            warn(f"tracking: {name} cannot be started: {reason_of(error)}; {_later(run, name)}")
    try:
        yield
    finally:
        for each in _finish(run, started, _DEADLINE_S, ends_early):
            if each.problem:
                warn(each.problem)
        # if nothing was started, no tracker has a run, and without this folder the run directory can be discarded
        if not run.exists():
            shutil.rmtree(run.path / "tracking", ignore_errors=True)


def track_now(run: RunDir, names: Sequence[TrackerName], environ: Mapping[str, str]) -> list[Tracked]:
    """Send the values of a run that trackers lack, unless another process does, and wait until this is done."""
    return _finish(run, [_start(name, run, environ, UNLESS_BUSY) for name in names], None)


def _start(name: TrackerName, run: RunDir, environ: Mapping[str, str], *options: str) -> _Started:
    log = run.path / "tracking" / f"{name}.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *SAFE_MODULE, "distlaunch.runs.tracking.follow", name, str(run.path), *options],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=dict(environ),
            # Ctrl-C in the terminal stops the run, which then closes the trackers
            start_new_session=True,
        )  # fmt: skip
    return _Started(name, process, log)


def _finish(
    run: RunDir, started: Sequence[_Started], deadline_s: float | None, ends_early: Callable[[], bool] = lambda: False
) -> list[Tracked]:
    """Let the processes send the remaining values, and wait for them."""
    ends = None if deadline_s is None else time.monotonic() + deadline_s
    for each in started:
        assert each.process.stdin is not None, "it is a pipe"
        # a process that has failed has closed its end
        with contextlib.suppress(OSError):
            each.process.stdin.close()
    return [_result(run, each, ends, deadline_s, ends_early) for each in started]


def _result(
    run: RunDir, started: _Started, ends: float | None, deadline_s: float | None, ends_early: Callable[[], bool]
) -> Tracked:
    """Wait for a process."""
    name = started.name
    code = _wait(started.process, ends, ends_early)
    if code is None:
        started.process.kill()
        started.process.wait()
        when = "before the wait for it was ended" if ends_early() else f"within {deadline_s:g} s"
        return Tracked(name, None, f"tracking: {name} did not get all values {when}; {_later(run, name)}")
    if code in set(SendOutcome):
        return Tracked(name, SendOutcome(code))
    why = f"{_last_line(started.log)} ({display_path(started.log)})"
    return Tracked(name, None, f"tracking: {name} failed: {why}; {_later(run, name)}")


def _wait(process: subprocess.Popen[bytes], ends: float | None, ends_early: Callable[[], bool]) -> int | None:
    """Return the exit code of a process, or None if it has not ended in time."""
    while not ends_early():
        left = math.inf if ends is None else ends - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_POLL_S, max(left, 0.0)))
        if left <= 0:
            break
    return process.poll()


def _later(run: RunDir, name: TrackerName) -> str:
    return f"`distlaunch track {display_path(run.path)} {name}` sends the rest"


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="locale", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"
    return "no output"
