"""Fixtures for tests with real processes under the real supervisor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from real import launchers
from supervised import processes_of, wait_until

from tests.conftest import is_cold


@pytest.fixture(scope="session")
def _commands() -> None:
    """Start the process from which commands are forked first, so that no test counts its descriptors as left open."""
    if not is_cold():
        launchers().commands.is_ready()


@pytest.fixture
def run_dir(tmp_path: Path, _commands: None) -> Iterator[Path]:
    """A run directory. All processes that were started for it must have ended at the end of the test."""
    path = tmp_path / "run"
    path.mkdir()
    fds = set(os.listdir("/proc/self/fd"))
    yield path
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not processes_of(path), 1)  # on a busy machine a killed process takes a moment to go
    left = processes_of(path)
    for process in left:
        process.kill()
    assert not left, f"still running: {left}"
    assert len(os.listdir("/proc/self/fd")) <= len(fds), "descriptors leaked"
