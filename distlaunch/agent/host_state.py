"""The free resources of a host at this moment, and which of the job's data it can see."""

from __future__ import annotations

import glob
import os
import resource
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any


def host_state(paths: Iterable[str]) -> dict[str, Any]:
    """Plain data, ready for a message. It looks from the working directory of the tasks.

    Args:
        paths: of data, perhaps with wildcards.
    """
    import psutil  # it costs 20 ms

    return {
        "free_bytes": {folder: shutil.disk_usage(folder).free for folder in (os.getcwd(), tempfile.gettempdir())},
        "free_memory_bytes": psutil.virtual_memory().available,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "missing": [path for path in paths if not is_there(path)],
    }


def is_there(path: str) -> bool:
    """Whether something has this path, or one that it matches."""
    return os.path.exists(path) or next(glob.iglob(path), None) is not None


def _limit(kind: int) -> int | None:
    """The limit that is in force; None: there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
