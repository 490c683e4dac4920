"""The cores of this process, and binding a new process to cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection


def num_visible_cores() -> int:
    """Return the number of cores to which this process is bound, or of all cores if it is not bound."""
    # Linux; macOS has no such call
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores for this process: TF_NUM_INTRAOP_THREADS if set, else the number of visible cores."""
    share = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(share) if share.isdigit() and int(share) else num_visible_cores()


def bind_to_cores(pid: int, cores: Collection[int]) -> None:
    """Bind a new process to cores before it creates threads. Do nothing if `cores` is empty."""
    if cores:
        with contextlib.suppress(OSError):  # the process has ended, or a core is no longer available
            os.sched_setaffinity(pid, cores)
