"""Facts about the hardware of a host, read without a framework.

`cluster.settings` chooses the tasks' environment variables and cores by these facts.

Tests can inject facts: the environment variable `DISTLAUNCH_TEST_HARDWARE` holds a JSON object whose members replace
fields of `Hardware` in every process that reads facts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distlaunch.base.plain_types import fits, is_dict
from distlaunch.cluster.cgroup import cpu_limit
from distlaunch.cluster.cores import num_visible_cores

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
GPU_THREADS = "TF_GPU_THREAD_MODE"
XLA_FLAGS = "XLA_FLAGS"
POOL_SIZES = ("TF_NUM_INTRAOP_THREADS", "NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables for the sizes of the computing thread pools of TensorFlow, XLA, OpenMP, OpenBLAS and MKL.

`TF_NUM_INTEROP_THREADS` is not limited: operations that wait for other tasks occupy threads of this pool, and with too
few threads the tasks would wait for each other forever.
"""
DECIDED = (ONEDNN, GPU_THREADS, XLA_FLAGS, *POOL_SIZES)
"""Variables that distlaunch sets for tasks, unless the user has set them."""

FEATURES = ("avx2", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
"""Features of CPUs that decide a setting, by their names in Linux's /proc/cpuinfo."""
INJECTED = "DISTLAUNCH_TEST_HARDWARE"
_NODES = Path("/sys/devices/system/node")
_CPU_INFO = Path("/proc/cpuinfo")


class Hardware(NamedTuple):
    """Facts about the hardware of a host. Agents import this class, and a dataclass would delay their start.

    Attributes:
        system: the operating system as in `sys.platform`, such as `linux`.
        architecture: such as `x86_64`.
        cpu: the vendor's name of the CPU; empty if unknown.
        features: those of `FEATURES` that the CPU has.
        logical_cores: number of cores of the host that the system shows.
        physical_cores: number of cores without hyper-threading; 0 if unknown.
        usable_cores: the cores to which a scheduler or `taskset` has bound this process; all cores if it is not bound.
        cpu_limit: the CPU limit of the cgroup (of a container) in cores; None without a limit.
        numa_nodes: the cores of each NUMA node, in order; empty if the system does not show them.
        gpus: the GPUs that the job may use.
        environ: the variables of `DECIDED` that the environment of tasks on this host sets.
    """

    system: str = ""
    architecture: str = ""
    cpu: str = ""
    features: Sequence[str] = ()
    logical_cores: int = 1
    physical_cores: int = 0
    usable_cores: Sequence[int] = (0,)
    cpu_limit: int | None = None
    numa_nodes: Sequence[Sequence[int]] = ()
    gpus: Sequence[str] = ()
    environ: Mapping[str, str] = {}

    @property
    def num_cores(self) -> int:
        """The number of cores that the tasks of a job may use together."""
        return max(1, min(len(self.usable_cores), self.cpu_limit or len(self.usable_cores)))


_KINDS: dict[str, Any] = {
    "system": str, "architecture": str, "cpu": str, "features": list[str], "logical_cores": int, "physical_cores": int,
    "usable_cores": list[int], "cpu_limit": int | None, "numa_nodes": list[list[int]], "gpus": list[str],
    "environ": dict[str, str],
}  # fmt: skip


def read_hardware(environ: Mapping[str, str], gpus: Sequence[str]) -> Hardware:
    """Return the facts about this host.

    Args:
        environ: the environment variables that tasks inherit on this host.
        gpus: the GPUs that the job may use; see `cluster.gpus.find_gpus`.
    """
    import psutil  # imported here, since it takes 20 ms

    cpu, features = _read_cpu()
    num_logical = os.cpu_count() or 1
    found = Hardware(
        system=sys.platform,
        architecture=os.uname().machine,
        cpu=cpu,
        features=features,
        logical_cores=num_logical,
        physical_cores=psutil.cpu_count(logical=False) or 0,
        usable_cores=sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(num_visible_cores())),
        cpu_limit=cpu_limit(),
        numa_nodes=node_cores(_NODES),
        gpus=tuple(gpus),
        environ={name: environ[name] for name in DECIDED if name in environ},
    )
    injected = environ.get(INJECTED)
    return found if injected is None else found._replace(**json.loads(injected))


def parse_hardware(plain: Any) -> Hardware:
    """Return the facts in a message of an agent. Raise ValueError if they are malformed."""
    if not is_dict(plain) or plain.keys() != _KINDS.keys():
        raise ValueError(f"hardware: got {plain!r:.80}")
    for name, kind in _KINDS.items():
        if not fits(plain[name], kind):
            raise ValueError(f"hardware: {name}: got {plain[name]!r:.80}")
    return Hardware(**plain)


def _read_cpu() -> tuple[str, tuple[str, ...]]:
    """Return the name of the first CPU, and those of FEATURES that it has; empty if the system does not show them."""
    facts: dict[str, str] = {}
    try:
        with _CPU_INFO.open(encoding="utf-8", errors="replace") as file:
            # the lines of other CPUs follow after an empty line, and hosts may have hundreds of them
            for line in iter(lambda: file.readline().strip(), ""):
                name, _, value = line.partition(":")
                facts[name.strip()] = value.strip()
    except OSError:
        return "", ()
    flags = set(facts.get("flags", "").split())
    return facts.get("model name", ""), tuple(name for name in FEATURES if name in flags)


def node_cores(folder: Path) -> list[list[int]]:
    """Return the cores of each NUMA node, in order; empty if the system does not show them.

    Source: sysfs-devices-node in Linux's documentation of the kernel's interfaces.
    """
    try:
        names = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
        return [_parse_cores(path.read_text(encoding="ascii")) for path in names]
    except (OSError, ValueError):
        return []


def _parse_cores(text: str) -> list[int]:
    """Parse a list of cores such as `0-3,8`, which is empty for a node that only has memory."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)
