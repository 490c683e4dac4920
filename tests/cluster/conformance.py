"""The conformance suite on real hosts; test_conformance.py runs it on the login host, and in an allocation of Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.local import Auto
from distlaunch.config.engines.slurm import Slurm
from distlaunch.config.engines.ssh import Ssh
from distlaunch.engines import make_engine
from distlaunch.engines.base import Engine, HostFiles
from distlaunch.testing.engines import Attempt, EngineConformance

HOSTS = ["host1", "host2", "host3"]


class OnHosts(EngineConformance):
    slots = 3

    def lose_host(self, attempt: Attempt, host: str) -> None:
        """End the connection, which is all that the launcher sees when a host loses its power."""
        (connection,) = [
            child
            for child in psutil.Process().children()
            if any(word in (host, f"--nodelist={host}") for word in child.cmdline())
        ]
        connection.kill()


@pytest.mark.skipif("SLURM_JOB_ID" in os.environ, reason="within an allocation")
class TestSsh(OnHosts):
    def make(self, folder: Path) -> Engine:
        return make_engine(Ssh(kind="ssh", hosts=HOSTS, folder="/tmp"), Machine.here(), HostFiles())


@pytest.mark.skipif("SLURM_JOB_ID" not in os.environ, reason="not within an allocation")
class TestSlurm(OnHosts):
    def make(self, folder: Path) -> Engine:
        return make_engine(Slurm(kind="slurm", folder="/tmp"), Machine.here(), HostFiles())

    def test_auto_stands_for_it(self) -> None:
        assert Auto().resolve(os.environ).kind == "slurm"
