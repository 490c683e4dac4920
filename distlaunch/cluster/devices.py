"""Which GPUs this machine has, asked without a framework, and each worker's share of them.

All commands count GPUs here, so that what `validate` accepts is what `train` starts.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distlaunch.base.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY_TIMEOUT_S = 10.0
_GPU = re.compile(r"GPU (\d+):.*?(?:\(UUID: (GPU-[^)]+)\))?\s*\Z")
_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi -L`, and the parts (MIG) that the GPU is split into."""

    number: str
    uuid: str = ""
    parts: tuple[str, ...] = ()

    def is_named(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES means this GPU or a part of it; CUDA takes the start of a UUID."""
        if name.isdigit():
            return int(name) == int(self.number)
        # the older name of a part is MIG-GPU-UUID/INSTANCE/INSTANCE
        whole = name.removeprefix("MIG-").partition("/")[0]
        return any(uuid.startswith(name) for uuid in self.parts) or bool(self.uuid and self.uuid.startswith(whole))


def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: those that nvidia-smi lists, and of these what the variable selects.

    Where nvidia-smi cannot be asked, there are those that the variable lists.
    """
    selected = environ.get(VISIBLE)
    if selected is not None and not _names(selected):
        return ()
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    present = _ask_driver(program) if program is not None else None
    if selected is None:
        return _all_names(present or ())
    return _selected(selected, present)


@functools.cache
def _ask_driver(program: str) -> tuple[Gpu, ...] | None:
    """The GPUs; none if the driver does not run; None if there is no answer."""
    try:
        answer = subprocess.run(
            [program, "-L"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_listing(answer.stdout) if answer.returncode == 0 else ()


def parse_listing(text: str) -> tuple[Gpu, ...]:
    """Reads `nvidia-smi -L`."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if found := _GPU.match(line):
            gpus.append(Gpu(found[1], found[2] or ""))
        elif (part := _MIG.match(line)) and gpus:
            gpus[-1] = Gpu(gpus[-1].number, gpus[-1].uuid, (*gpus[-1].parts, part[1]))
    return tuple(gpus)


def _all_names(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """A GPU that is split counts as its parts."""
    return tuple(name for gpu in gpus for name in (gpu.parts or [gpu.number]))


def _selected(listed: str, present: Sequence[Gpu] | None) -> tuple[str, ...]:
    """As CUDA reads it: the list ends at the first entry that is no device. `present`: None if not known."""
    names: list[str] = []
    for name in _names(listed):
        if present is not None and not any(gpu.is_named(name) for gpu in present):
            break
        names.append(name)
    return tuple(names)


def _names(listed: str) -> list[str]:
    """The entries up to the first that cannot name a device: `-1`, nothing, another word."""
    names: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (re.fullmatch(r"[0-9]+", entry) or entry.startswith(("GPU-", "MIG-"))):
            break
        names.append(entry)
    return names


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
