"""The engines of distlaunch pass the conformance suite that packages with engines import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.local import Local
from distlaunch.config.engines.ssh import Ssh
from distlaunch.engines import make_engine
from distlaunch.engines.base import Engine, HostFiles
from distlaunch.engines.remote.allocation import RemoteAllocation
from distlaunch.testing.engines import Attempt, EngineConformance
from tests.plugins.nice_engine import Nice, NiceEngine

_SSH = """#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""


class TestLocal(EngineConformance):
    def make(self, folder: Path) -> Engine:
        return make_engine(Local(kind="local"), Machine.here(), HostFiles())


class TestNice(EngineConformance):
    """The example of an engine in a package of its own."""

    def make(self, folder: Path) -> Engine:
        return NiceEngine(Nice(kind="nice"), Machine.here())


class TestSsh(EngineConformance):
    """Agents that a program called `ssh` starts on this machine; tests/cluster has real hosts."""

    slots = 4

    @pytest.fixture(autouse=True)
    def _program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(_SSH)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def make(self, folder: Path) -> Engine:
        section = Ssh(kind="ssh", hosts=["first slots=1", "second slots=1", "third slots=2"], host_timeout_s=5)
        return make_engine(section, Machine.here(), HostFiles())

    def lose_host(self, attempt: Attempt, host: str) -> None:
        assert isinstance(attempt.allocation, RemoteAllocation)
        os.kill(attempt.allocation.links[host].facts["pid"], signal.SIGKILL)
