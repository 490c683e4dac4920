"""Facts about the control group (cgroup v2) in which a container or a scheduler runs this process."""

from __future__ import annotations

import re
from pathlib import Path


def read_cgroup(name: str) -> str:
    """Return the text of a file of the cgroup, such as `cpu.max`. Raise OSError if there is none."""
    # cgroup v2 has one line, such as `0::/user.slice/session-1.scope`
    group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2]
    return Path(f"/sys/fs/cgroup{group.rstrip('/')}/{name}").read_text(encoding="utf-8")


def oom_kills() -> int | None:
    """Return how many processes the OOM killer has ended in the cgroup of this process, or None if unknown."""
    try:
        text = read_cgroup("memory.events")
    except OSError:
        return None
    # `oom` would also count the times when a limit was reached without killing a process
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None
