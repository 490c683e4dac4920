"""Whether this host has run out of memory."""

from __future__ import annotations

import re
from pathlib import Path


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this process's cgroup; None if it cannot be told."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        text = Path(f"/sys/fs/cgroup{group.rstrip('/')}/memory.events").read_text()
    except OSError:
        return None
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None
