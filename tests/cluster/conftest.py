"""Real hosts with a real sshd, once for each file of tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, what_is_missing
from slurm import PROGRAMS, Slurm


@pytest.fixture(scope="module")
def own_disk() -> Iterator[Path]:
    """A folder on the local disk of each host."""
    # not below pytest's own folder, whose names are long
    with tempfile.TemporaryDirectory(prefix="dl-disk-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def _hosts(own_disk: Path) -> Iterator[Lab]:
    if missing := what_is_missing():
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="dl-lab-") as folder:
        lab = Lab(Path(folder), 3, own_disk)
        try:
            yield lab
        finally:
            lab.down()


@pytest.fixture(scope="module")
def slurm(_hosts: Lab) -> Slurm:
    """The three hosts as nodes of a Slurm cluster; the login host is its controller."""
    if missing := what_is_missing(PROGRAMS):
        pytest.skip(missing)
    return Slurm(_hosts)


@pytest.fixture
def lab(_hosts: Lab) -> Iterator[Lab]:
    """Three hosts in addition to the login host. No process may be left on them at the end of a test."""
    try:
        yield _hosts
        left = _hosts.left()
        assert not left, left
    finally:
        _hosts.clean()
