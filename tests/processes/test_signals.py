"""Signals to a real launcher process, up to SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from supervised import REPOSITORY, processes_of, wait_until

CLEAN = ["stop_cleanly"]
STUBBORN = ["ignore_sigterm", "train", "hang"]


def launch(run_dir: Path, *tasks: list[str], stop_timeout_s: float = 20) -> subprocess.Popen[str]:
    words = [word for task in tasks for word in ["--", *task]][1:]
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(here / "launcher.py"), str(run_dir), str(stop_timeout_s), *words],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{here}", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: all((run_dir / f"hanging-{index}").exists() for index in range(len(tasks))))
    wait_until(lambda: len(processes_of(run_dir)) >= len(tasks))
    return process


def end(process: subprocess.Popen[str], timeout_s: float = 15) -> tuple[int, dict[str, Any]]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()  # also when it did not end in time
    return process.returncode, json.loads(output) if output else {}


def test_ctrl_c_stops_cleanly(run_dir: Path) -> None:
    process = launch(run_dir, CLEAN, CLEAN)
    process.send_signal(signal.SIGINT)
    code, told = end(process)
    assert (code, told["status"]) == (4, "interrupted")
    assert told["notes"] == ["stopping after the current step; press Ctrl-C again to end at once"]


def test_ctrl_c_twice_ends_at_once(run_dir: Path) -> None:
    process = launch(run_dir, STUBBORN, STUBBORN)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)  # a person's second press, not a signal told twice
    process.send_signal(signal.SIGINT)
    code, told = end(process)
    assert (code, told["status"]) == (4, "interrupted")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_sigterm_stops_cleanly(run_dir: Path, number: signal.Signals) -> None:
    process = launch(run_dir, CLEAN, CLEAN)
    process.send_signal(number)
    assert end(process)[0] == 4


def test_sigterm_kills_who_does_not_stop(run_dir: Path) -> None:
    """Failed, unless the chief has told that it has stopped, which it does after the checkpoint."""
    process = launch(run_dir, STUBBORN, CLEAN, stop_timeout_s=0.5)
    process.send_signal(signal.SIGTERM)
    code, told = end(process)
    assert (code, told["status"]) == (3, "failed")


def test_sigterm_kills_who_does_not_end_after_the_checkpoint(run_dir: Path) -> None:
    process = launch(run_dir, CLEAN, STUBBORN, stop_timeout_s=0.5)
    process.send_signal(signal.SIGTERM)
    code, told = end(process)
    assert (code, told["status"]) == (4, "stopped")


@pytest.mark.parametrize("actions", [["honour_lifeline"], [], ["fork_stubborn"]])
def test_nothing_survives_a_killed_launcher(run_dir: Path, actions: list[str]) -> None:
    process = launch(run_dir, [*actions, *STUBBORN], ["honour_lifeline", *STUBBORN])
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(run_dir), timeout_s=5)


def test_the_lifeline_works_without_the_guard(run_dir: Path) -> None:
    import psutil

    process = launch(run_dir, ["honour_lifeline", *STUBBORN])
    guards = [p for p in psutil.Process(process.pid).children() if any("orphan_guard" in word for word in p.cmdline())]
    assert len(guards) == 1
    guards[0].kill()
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(run_dir), timeout_s=5)
