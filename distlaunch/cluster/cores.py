"""The cores that this process may use, and how tasks that compute at the same time share those of a host.

Without a share, each task starts threads for all cores. Measured on 2 cores with TensorFlow 2.21, a CNN, steps of
`multi_worker_mirrored` with shares beside steps without: 0.88 of the time with 2 tasks, 0.85 with 4, 0.87 with 8.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from distlaunch.cluster.cgroup import read_cgroup

POOL_SIZES = ("TF_NUM_INTRAOP_THREADS", "NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The pools that compute: TensorFlow's, XLA's, OpenMP's, OpenBLAS's, MKL's. Not `TF_NUM_INTEROP_THREADS`: operations
that wait for other tasks take its threads, and with too few of them the tasks wait for each other for ever."""
NODES = Path("/sys/devices/system/node")
Cores = frozenset[int]
_ANY: Cores = frozenset()


def num_visible_cores() -> int:
    """Return the number of cores to which a scheduler or `taskset` has bound this process."""
    # Linux; macOS has no such call
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores of this process, which is a share where tasks share a machine."""
    share = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(share) if share.isdigit() and int(share) else num_visible_cores()


def pool_sizes(num_tasks: int) -> dict[str, str]:
    """Return the environment variables that limit each task to its share of the cores; empty if there is no limit."""
    seen = num_visible_cores()
    share = max(1, min(seen, _quota() or seen) // max(1, num_tasks))
    # with no variables a task behaves as it does without the launcher
    return {} if share == seen else dict.fromkeys(POOL_SIZES, str(share))


def _quota() -> int | None:
    """Return the CPU limit of the cgroup (of a container) in cores, or None if there is none or it is unknown.

    Source: cpu.max in Linux's documentation of cgroup v2.
    """
    try:
        quota, period = read_cgroup("cpu.max").split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


class NumaShares:
    """Deals the NUMA nodes of this host out to its tasks, neighbours to the same one: memory is then that of the node.

    Source: sysfs-devices-node in Linux's documentation of the kernel's interfaces.

    Args:
        num_computing: how many tasks share the cores; those that come after them get any.
    """

    def __init__(self, num_computing: int) -> None:
        nodes = node_cores(NODES)  # only Linux shows them, and there a process knows its cores
        usable = frozenset(os.sched_getaffinity(0)) if nodes else _ANY
        self._shares = shares(num_computing, nodes, usable, os.cpu_count() or 1)
        self._numbers: dict[str, int] = {}

    def of(self, task: str, env: Mapping[str, str]) -> Cores:
        """Return the cores of a task, the same ones after a restart; empty for all that this process may use."""
        number = self._numbers.setdefault(task, len(self._numbers))
        if env.get("CUDA_VISIBLE_DEVICES", "-1") not in ("", "-1"):
            return _ANY  # which node its GPUs are at is not known here
        return self._shares[number] if number < len(self._shares) else _ANY


def shares(num_tasks: int, nodes: Collection[Cores], usable: Cores, num_cores: int) -> list[Cores]:
    """Return the cores of each task; empty if nodes cannot be shared equally, or this process is bound to cores.

    Args:
        nodes: the cores of each node.
        usable: those that this process may use.
        num_cores: how many the host has.
    """
    nodes = [cores & usable for cores in nodes if cores & usable]
    if len(usable) < num_cores or len(nodes) < 2 or num_tasks % len(nodes) or len({*map(len, nodes)}) > 1:
        return []
    return [nodes[number * len(nodes) // num_tasks] for number in range(num_tasks)]


def node_cores(folder: Path) -> list[Cores]:
    """Return the cores of each NUMA node, in order; empty if the system does not show them."""
    try:
        names = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
        return [_parse(path.read_text()) for path in names]
    except (OSError, ValueError):
        return []


def bind(pid: int, cores: Cores) -> None:
    """Bind a process that has just been started to cores, before it has threads; no cores do nothing."""
    if cores:
        with contextlib.suppress(OSError):  # it has ended, or a core is gone: it runs anywhere
            os.sched_setaffinity(pid, cores)


def _parse(text: str) -> Cores:
    """Parse a list of cores such as `0-3,8`; a node with memory only has none."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
