"""The cores that this process may use."""

from __future__ import annotations

import os


def num_visible_cores() -> int:
    """Return the number of cores to which a scheduler or `taskset` has bound this process."""
    # Linux; macOS has no such call
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores of this process, which is a share where tasks share a machine."""
    share = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(share) if share.isdigit() and int(share) else num_visible_cores()
