"""Tests of which disks belong to this host alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from distlaunch.base.local_disks import is_local_disk


def test_what_the_system_has() -> None:
    assert not is_local_disk(Path("/proc/self"))
    if any(disk.mountpoint == "/dev/shm" for disk in psutil.disk_partitions(all=True)):
        assert is_local_disk(Path("/dev/shm/not-there-yet/file"))


@pytest.mark.parametrize(
    ("place", "is_local"),
    [
        ("/", True),
        ("/homes/a", True),
        ("/home", False),
        ("/home/a/runs", False),
        ("/home/scratch/a", True),
        ("/home/scratch2/a", False),
        ("/hidden/a", False),
        ("/unknown/a", False),
    ],
)
def test_the_innermost_and_last_mount_counts(monkeypatch, place: str, is_local: bool) -> None:
    mounts = [("/", "ext4"), ("/home/scratch", "xfs"), ("/home", "nfs4"), ("/hidden", "ext4"), ("/hidden", "lustre"),
              ("/unknown", "fuse.sshfs")]  # fmt: skip
    found = [SimpleNamespace(mountpoint=mountpoint, fstype=kind) for mountpoint, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found if all else [])
    assert is_local_disk(Path(place)) == is_local


def test_a_link_is_followed(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to("/elsewhere/runs")
    found = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint="/elsewhere", fstype="nfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert not is_local_disk(tmp_path / "here")
    assert is_local_disk(tmp_path)
