"""The engines keep their contract on real hosts, with a shared disk and without, and on the nodes of a real Slurm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lab import Job, Lab
from slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
_SUITE = str(Path(__file__).with_name("conformance.py"))


def _pytest(folder: Path) -> list[str]:
    options = ("-n", "0", "-p", "no:cacheprovider", "-m", "", "--rootdir", str(Path(_SUITE).parent), "-c", "/dev/null")
    return [sys.executable, "-P", "-m", "pytest", "-q", *options, f"--basetemp={folder}", _SUITE]


def _passes(job: Job) -> None:
    assert job.end(300) == 0, job.output
    found = re.search(r"(\d+) passed", job.output)
    assert found, job.output
    assert int(found[1]) >= 18, job.output


def test_ssh_with_a_shared_disk(lab: Lab, tmp_path: Path) -> None:
    _passes(lab.run(0, _pytest(tmp_path / "shared")))


def test_ssh_without_a_shared_disk(lab: Lab, own_disk: Path) -> None:
    _passes(lab.run(0, _pytest(own_disk / "own")))


def test_slurm(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    _passes(slurm.run("salloc", "-N3", *_pytest(tmp_path / "slurm")))
