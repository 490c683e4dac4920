"""Facts about the control group (cgroup v2) in which a container or a scheduler runs this process."""

from __future__ import annotations

from pathlib import Path


def read_cgroup(name: str) -> str:
    """The text of one of its files, such as `cpu.max`. Raises OSError if there is none."""
    # cgroup v2 has one line, such as `0::/user.slice/session-1.scope`
    group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2]
    return Path(f"/sys/fs/cgroup{group.rstrip('/')}/{name}").read_text(encoding="utf-8")
