"""Disks that belong to this host alone, so that mapped files cannot be changed by other hosts."""

from __future__ import annotations

from pathlib import Path

_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})


def is_local_disk(path: Path) -> bool:
    """Return True if a file or folder is on a disk of this host; False also if unknown."""
    import psutil

    place, kind = path.resolve(), ""
    depth = -1
    for disk in psutil.disk_partitions(all=True):
        mounted = Path(disk.mountpoint)
        # one that is mounted later hides those before it
        if place.is_relative_to(mounted) and len(mounted.parts) >= depth:
            depth, kind = len(mounted.parts), disk.fstype
    return kind in _LOCAL
