"""The GPUs of this machine, found without a framework, and each worker's share of them.

All commands count GPUs with this module, so that `train` can start each config that `validate` accepts.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distlaunch.base.errors import UsageError
from distlaunch.base.plural import count

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_TIMEOUT_S = 10.0  # limit for a driver that hangs
LIBRARY = "libnvidia-ml.so.1"
"""NVML, NVIDIA's management library, which comes with the driver."""
CUDA = "libcuda.so.1"
DEVICES = "dev/nvidia[0-9]*"
"""Device files below `/`. A framework needs them and the driver's CUDA library to see a GPU."""


class Gpu(NamedTuple):
    """A GPU with its number in NVML, as in `nvidia-smi -L`, and its MIG parts."""

    number: str
    uuid: str = ""
    parts: tuple[str, ...] = ()

    def is_named(self, name: str) -> bool:
        """Return True if an entry of CUDA_VISIBLE_DEVICES names this GPU or a part of it.

        CUDA accepts prefixes of UUIDs.
        """
        if name.isdigit():
            return int(name) == int(self.number)
        # the older name of a part is MIG-GPU-UUID/INSTANCE/INSTANCE
        whole = name.removeprefix("MIG-").partition("/")[0]
        return any(uuid.startswith(name) for uuid in self.parts) or bool(self.uuid and self.uuid.startswith(whole))


def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the driver's GPUs that CUDA_VISIBLE_DEVICES selects, in the form of this variable.

    Without a driver, return none, whatever the variable lists: TensorFlow and JAX see none either. If the driver does
    not answer, return the GPUs that the variable lists.
    """
    selected = environ.get(VISIBLE)
    # `-1` or an empty list selects no GPU, so the driver is not queried
    if selected is not None and not _names(selected):
        return ()
    driver = query_driver()
    present = driver and driver.gpus
    if selected is None:
        return _all_names(present or ())
    return _selected(selected, present)


def driver_version() -> str:
    """Return the version of the GPU driver, or an empty string if there is none."""
    driver = query_driver()
    return driver.version if driver else ""


class GpuUse(NamedTuple):
    """The use of several GPUs by all processes.

    Attributes:
        percent: the percentage of time in which a GPU computed, as the mean of all GPUs; None if the driver does not
            report it, as for MIG.
        memory_bytes: memory in use on all of them.
    """

    percent: float | None
    memory_bytes: int


class GpuMeter:
    """Measures the GPUs that CUDA_VISIBLE_DEVICES selects, without ever waiting for the driver."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._names = find_gpus(environ)
        self._last: GpuUse | None = None
        self._asking: threading.Thread | None = None

    def read(self) -> GpuUse | None:
        """Return the newest measurement, and begin another. None without GPUs, or until the first is complete."""
        # measure in a thread, since a driver that hangs must not stop training; start no other while that thread runs
        if self._names and not (self._asking and self._asking.is_alive()):
            self._asking = threading.Thread(target=self._measure, name="nvml", daemon=True)
            self._asking.start()
        return self._last

    def _measure(self) -> None:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        try:
            self._last = _use_of(pynvml, self._names)
        except pynvml.NVMLError:
            self._last = None
        finally:
            pynvml.nvmlShutdown()


def _use_of(nvml: Any, names: Sequence[str]) -> GpuUse | None:
    devices = list(_devices(nvml, names))
    memory_bytes = sum(int(nvml.nvmlDeviceGetMemoryInfo(device).used) for device in devices)
    return GpuUse(_utilization(nvml, devices), memory_bytes) if devices else None


def _devices(nvml: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield NVML's devices for names as in CUDA_VISIBLE_DEVICES; MIG parts for GPUs that are divided."""
    for gpu in _gpus(nvml):
        parts = [part for part in gpu.parts if any(part.startswith(name) for name in names)]
        for part in parts:
            yield nvml.nvmlDeviceGetHandleByUUID(part)
        if not parts and any(gpu.is_named(name) for name in names):
            yield nvml.nvmlDeviceGetHandleByIndex(int(gpu.number))


def _utilization(nvml: Any, devices: Sequence[Any]) -> float | None:
    try:
        found = [float(nvml.nvmlDeviceGetUtilizationRates(device).gpu) for device in devices]
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return None
    return sum(found) / len(found)


class _Driver(NamedTuple):
    """The GPUs and version of the driver. Both are empty if the driver does not run."""

    gpus: tuple[Gpu, ...] = ()
    version: str = ""


@functools.cache
def query_driver() -> _Driver | None:
    """Return the GPUs and version of the driver, or None if it does not answer."""
    if not _can_open(LIBRARY):  # avoids importing pynvml, which would take 20 ms in every command
        return _without_nvml()
    answers: list[_Driver | None] = []
    # query in a thread, since a driver that hangs must not block the command
    asking = threading.Thread(target=lambda: answers.append(_present()), name="nvml", daemon=True)
    asking.start()
    asking.join(QUERY_TIMEOUT_S)
    # a call into a driver that hangs cannot be ended, so the thread is abandoned
    return answers[0] if answers else None


def _present() -> _Driver | None:
    import pynvml  # pyright: ignore[reportMissingTypeStubs]

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_FunctionNotFound):  # pyright: ignore
        return _without_nvml()
    except pynvml.NVMLError:  # the kernel module is not loaded, or does not match the version of the library
        return _Driver()
    try:
        return _Driver(tuple(_gpus(pynvml)), _text(pynvml.nvmlSystemGetDriverVersion()))
    except pynvml.NVMLError:  # a GPU is lost, so it is unknown how CUDA would number the others
        return _Driver()
    finally:
        pynvml.nvmlShutdown()


def _without_nvml() -> _Driver | None:
    """Look for a driver where NVML is missing; return None if there is one, since its GPUs are then unknown.

    Containers with NVIDIA_DRIVER_CAPABILITIES=compute have only CUDA and the device files.
    """
    return None if any(Path("/").glob(DEVICES)) and _can_open(CUDA) else _Driver()


def _can_open(library: str | None) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gpus(nvml: Any) -> Iterator[Gpu]:
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        yield Gpu(str(number), _uuid(nvml, handle), tuple(_parts(nvml, handle)))


def _parts(nvml: Any, gpu: Any) -> Iterator[str]:
    try:
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # a GPU or a driver from before MIG
        return
    for place in range(most):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):  # not in use, or used by another container
            continue
        yield _uuid(nvml, part)


def _uuid(nvml: Any, device: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(device))


def _text(found: bytes | str) -> str:
    # an older package that is also called pynvml returns bytes
    return found.decode() if isinstance(found, bytes) else str(found)


def _all_names(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the names of all devices. A GPU with MIG parts is replaced by its parts."""
    return tuple(name for gpu in gpus for name in (gpu.parts or [gpu.number]))


def _selected(listed: str, present: Sequence[Gpu] | None) -> tuple[str, ...]:
    """Return the selected devices. As in CUDA, the list ends before the first unknown entry.

    Args:
        present: the GPUs of the driver; None if unknown.
    """
    names: list[str] = []
    for name in _names(listed):
        if present is not None and not any(gpu.is_named(name) for gpu in present):
            break
        names.append(name)
    return tuple(names)


def _names(listed: str) -> list[str]:
    """Return the entries before the first one that cannot name a device: `-1`, an empty entry, another word."""
    names: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (re.fullmatch(r"[0-9]+", entry) or entry.startswith(("GPU-", "MIG-"))):
            break
        names.append(entry)
    return names


def share_gpus(gpus: Sequence[str], num_workers: int, per_worker: int | None) -> list[tuple[str, ...]]:
    """Return the GPUs of each worker, in order, with the same number for each.

    Args:
        per_worker: number of GPUs of each worker; None for an equal share.

    Raises:
        UsageError: there are GPUs, but too few.
    """
    if not gpus:
        return [()] * num_workers
    share = per_worker or len(gpus) // num_workers
    if not share or share * num_workers > len(gpus):
        each = "" if per_worker is None else f" with {count(per_worker, 'GPU')} each"
        raise UsageError(
            f"{num_workers} workers{each} do not fit on {count(len(gpus), 'GPU')} ({', '.join(gpus)}): use fewer, "
            f"or hide the GPUs with {VISIBLE}='' to train on CPU"
        )
    return [tuple(gpus[first : first + share]) for first in range(0, share * num_workers, share)]
