"""Which GPUs this machine has, asked without a framework, and each worker's share of them."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence

from distlaunch.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY_TIMEOUT_S = 10.0
_GPU = re.compile(r"GPU (\d+):")
_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: those it lists, else those that nvidia-smi lists, else none."""
    listed = environ.get(VISIBLE)
    if listed is not None:
        return _visible(listed)
    return _ask_driver()


@functools.cache
def _ask_driver() -> tuple[str, ...]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_listing(answer.stdout) if answer.returncode == 0 else ()


def parse_listing(text: str) -> tuple[str, ...]:
    """Reads `nvidia-smi -L`. A GPU that is split (MIG) counts as its parts."""
    devices: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            devices.append((gpu[1], []))
        elif (part := _MIG.match(line)) and devices:
            devices[-1][1].append(part[1])
    return tuple(name for number, parts in devices for name in (parts or [number]))


def share_gpus(gpus: Sequence[str], num_workers: int, per_worker: int | None) -> list[tuple[str, ...]]:
    """The GPUs of each worker, in order, as many for one as for the other. No GPUs: nothing for all.

    Args:
        per_worker: how many each takes; None: its share.

    Raises:
        UsageError: there are GPUs, but not enough of them.
    """
    if not gpus:
        return [()] * num_workers
    count = per_worker or len(gpus) // num_workers
    if not count or count * num_workers > len(gpus):
        wanted = (
            f"{num_workers} workers" if per_worker is None else f"{num_workers} workers with {per_worker} GPU(s) each"
        )
        raise UsageError(
            f"{wanted} do not fit on {len(gpus)} GPU(s) ({', '.join(gpus)}): use fewer, "
            f"or hide the GPUs with {VISIBLE}='' to train on CPU"
        )
    return [tuple(gpus[first : first + count]) for first in range(0, count * num_workers, count)]


def _visible(listed: str) -> tuple[str, ...]:
    """As CUDA reads it: the list ends at the first entry that is no device."""
    devices: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        devices.append(entry)
    return tuple(devices)
