"""Whether this host has run out of memory."""

from __future__ import annotations

import re

from distlaunch.agent.cgroup import read_cgroup


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this process's cgroup; None if unknown."""
    try:
        text = read_cgroup("memory.events")
    except OSError:
        return None
    # not `oom`, which also counts when a limit was met and nobody killed
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None
