"""Which cores a task gets on a host with several NUMA nodes: those of one node, from which its memory then comes too.

Source: sysfs-devices-node in Linux's documentation of the kernel's interfaces.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

NODES = Path("/sys/devices/system/node")
Cores = frozenset[int]
_ANY: Cores = frozenset()


class NumaShares:
    """Deals the nodes out to the tasks of this host, neighbours to the same one.

    Args:
        num_computing: how many tasks share the cores; those that come after them get any.
    """

    def __init__(self, num_computing: int) -> None:
        nodes = node_cores(NODES)  # only Linux shows them, and there a process knows its cores
        usable = frozenset(os.sched_getaffinity(0)) if nodes else _ANY
        self._shares = shares(num_computing, nodes, usable, os.cpu_count() or 1)
        self._numbers: dict[str, int] = {}

    def of(self, task: str, env: Mapping[str, str]) -> Cores:
        """The cores of a task, the same ones if it is started again; empty: all that this process may use."""
        number = self._numbers.setdefault(task, len(self._numbers))
        if env.get("CUDA_VISIBLE_DEVICES", "-1") not in ("", "-1"):
            return _ANY  # which node its GPUs are at is not known here
        return self._shares[number] if number < len(self._shares) else _ANY


def shares(num_tasks: int, nodes: Collection[Cores], usable: Cores, num_cores: int) -> list[Cores]:
    """The cores of each task; empty where nodes cannot be shared out equally, or somebody has bound this process.

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
    """The cores of each node, in the nodes' order; empty where the system does not show them."""
    try:
        names = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
        return [_parse(path.read_text()) for path in names]
    except (OSError, ValueError):
        return []


def bind(pid: int, cores: Cores) -> None:
    """Binds a process that has just been started, before it has threads; does nothing for no cores."""
    if cores:
        with contextlib.suppress(OSError):  # it has ended, or a core is gone: it runs anywhere
            os.sched_setaffinity(pid, cores)


def _parse(text: str) -> Cores:
    """`0-3,8` as the kernel writes it; a node with memory only has none."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
