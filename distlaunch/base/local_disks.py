"""Recognizes local disks, whose mapped files other hosts cannot change."""

from __future__ import annotations

from pathlib import Path

_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})


def is_local_disk(path: Path) -> bool:
    """Return True if a file or folder is on a local disk; False if it is not, or if the kind of disk is unknown."""
    import psutil

    place, kind = path.resolve(), ""
    depth = -1
    for disk in psutil.disk_partitions(all=True):
        mounted = Path(disk.mountpoint)
        # a later mount at the same place hides earlier ones
        if place.is_relative_to(mounted) and len(mounted.parts) >= depth:
            depth, kind = len(mounted.parts), disk.fstype
    return kind in _LOCAL
