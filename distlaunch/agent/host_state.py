"""The free resources of a host at this moment, and the data of the job that is missing on the host."""

from __future__ import annotations

import glob
import os
import resource
from collections.abc import Iterable
from typing import Any

from distlaunch.cluster.cgroup import available_memory


def host_state(paths: Iterable[str]) -> dict[str, Any]:
    """Return the state of this host for a message.

    Args:
        paths: paths of data, perhaps with wildcards. Relative paths start in the current directory, which is also the
            working directory of the tasks.
    """
    return {
        "free_bytes": {folder: _free_bytes(folder) for folder in (os.getcwd(), _temporary_folder())},
        "free_memory_bytes": available_memory(),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "missing": [path for path in paths if not is_there(path)],
    }


def is_there(path: str) -> bool:
    """Return True if a file or folder exists at this path, or matches it as a pattern."""
    return os.path.exists(path) or next(glob.iglob(path), None) is not None


def _temporary_folder() -> str:
    """Return the folder of temporary files. Importing `tempfile` for that would take each agent 3 ms."""
    named = os.environ.get("TMPDIR", "")
    return named if os.path.isdir(named) else "/tmp"


def _free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder for a user who is not root."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _limit(kind: int) -> int | None:
    """Return the current limit, or None if there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
