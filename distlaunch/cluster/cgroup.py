"""Facts about the control group (cgroup) of this process: those of version 2, and the limits of version 1.

Containers and schedulers put processes into control groups to limit their resources.

Sources: `cpu.max` and `memory.max` in Linux's documentation of cgroup v2; `cpu.cfs_quota_us` in that of the CFS
bandwidth controller, `memory.limit_in_bytes` in that of the memory controller of v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def read_cgroup(name: str) -> str:
    """Return the text of a file of the cgroup, such as `cpu.max`. Raise OSError if there is none."""
    # cgroup v2 has one line, such as `0::/user.slice/session-1.scope`
    group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2]
    return Path(f"/sys/fs/cgroup{group.rstrip('/')}/{name}").read_text(encoding="utf-8")


def cpu_limit(root: Path = _ROOT) -> int | None:
    """Return the lowest CPU limit of the cgroup and its parents, in cores; None if there is none or it is unknown.

    Args:
        root: the folder with `proc` and `sys`.
    """
    limits = [limit for folder, is_v2 in _groups("cpu", root) for limit in _limit_of(folder, is_v2=is_v2)]
    return max(1, round(min(limits))) if limits else None


def available_memory(root: Path = _ROOT) -> int:
    """Return the memory that this process can still get, in bytes: that of the host, or less within a limit.

    Args:
        root: the folder with `proc` and `sys`.
    """
    import psutil  # imported here, since it takes 20 ms

    rooms = [room for folder, is_v2 in _groups("memory", root) for room in _room_in(folder, is_v2=is_v2)]
    return max(0, min([psutil.virtual_memory().available, *rooms]))


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the cgroup and its parents that may limit a resource, and whether they have version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        # `0::GROUP` for v2, `4:cpu,cpuacct:GROUP` for v1
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers if controllers else root / "sys/fs/cgroup"
        folder = top / group.lstrip("/")
        # within a container, the group's path may be that of the host, which does not exist there
        for each in dict.fromkeys([folder, *folder.parents, top]):
            if each.is_relative_to(top):
                yield each, not controllers


def _limit_of(folder: Path, *, is_v2: bool) -> Iterator[float]:
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        # `max` in v2 and -1 in v1 mean no limit
        if int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def _room_in(folder: Path, *, is_v2: bool) -> Iterator[int]:
    limit, usage, cached = (
        ("memory.max", "memory.current", "inactive_file")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        # `max` in v2 means no limit; in v1 that is a number larger than any memory
        room = int((folder / limit).read_text(encoding="utf-8"))
        room -= int((folder / usage).read_text(encoding="utf-8"))
        stat = (folder / "memory.stat").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    # the kernel gives up cached files before it ends a process
    found = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
    yield room + (int(found[1]) if found else 0)


def oom_kills() -> int | None:
    """Return how many processes the OOM killer has ended in the cgroup of this process, or None if unknown."""
    try:
        text = read_cgroup("memory.events")
    except OSError:
        return None
    # `oom` would also count the times when a limit was reached without killing a process
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None
