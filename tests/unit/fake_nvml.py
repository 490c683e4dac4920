"""NVIDIA's management library, without a driver: what the real `pynvml` calls in the place of `libnvidia-ml.so.1`.

As a module called `pynvml` in front of the real one, it brings the library into a real process: see `write_package`.
"""

from __future__ import annotations

import _ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUCCESS, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, GPU_IS_LOST = 0, 3, 4, 6, 15
DRIVER_NOT_LOADED, VERSION_MISMATCH = 9, 18
PART_BYTES = 1 << 20
"""Memory in use on each part."""


@dataclass
class FakeGpu:
    """A GPU; its parts by their places, of which some are empty (None) or another container's ("").

    Attributes:
        percent: its utilization; None if the driver does not report it.
    """

    uuid: str
    parts: Sequence[str | None] = ()
    lost: bool = False
    percent: int | None = 0
    used_bytes: int = 0


@dataclass
class FakeNvml:
    """The functions of the library by their names in C, as far as they are called.

    Attributes:
        on_init: what `nvmlInit` returns, or does before it succeeds.
        without: functions that a library of this age does not have.
    """

    gpus: Sequence[FakeGpu] = ()
    on_init: int | Callable[[], None] = SUCCESS
    without: Sequence[str] = ()
    open: int = field(default=0, init=False)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.without:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802
        if isinstance(self.on_init, int):
            self.open += self.on_init == SUCCESS
            return self.on_init
        self.on_init()
        self.open += 1
        return SUCCESS

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return SUCCESS

    def nvmlSystemGetDriverVersion(self, text: Any, length: Any) -> int:  # noqa: N802
        text.value = b"550.54.15"
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        device._obj.fake = self.gpus[index.value]
        return GPU_IS_LOST if device._obj.fake.lost else SUCCESS

    def nvmlDeviceGetUUID(self, device: Any, text: Any, length: Any) -> int:  # noqa: N802
        text.value = getattr(device.fake, "uuid", device.fake).encode()
        return SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:  # noqa: N802
        name = uuid.value.decode()
        gpu = next(gpu for gpu in self.gpus if name in (gpu.uuid, *gpu.parts))
        device._obj.fake = gpu if name == gpu.uuid else FakeGpu(name, percent=None, used_bytes=PART_BYTES)
        return SUCCESS

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.used = device.fake.used_bytes
        return SUCCESS

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:  # noqa: N802
        if device.fake.percent is None:
            return NOT_SUPPORTED
        rates._obj.gpu = device.fake.percent
        return SUCCESS

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(device.fake.parts)
        return SUCCESS

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: Any, part: Any) -> int:  # noqa: N802
        part._obj.fake = device.fake.parts[index.value]
        return {None: NOT_FOUND, "": NO_PERMISSION}.get(part._obj.fake, SUCCESS)


def write_package(folder: Path, gpus: str) -> dict[str, str]:
    """Writes a `pynvml` and a library of the driver's name; returns the environment in which a process finds them.

    Args:
        gpus: Python code for a list of `FakeGpu`.
    """
    import pynvml

    folder.mkdir()
    (folder / "fake_nvml.py").write_text(Path(__file__).read_text())
    (folder / "pynvml.py").write_text(
        f"exec(compile(open({pynvml.__file__!r}).read(), 'pynvml.py', 'exec'))\n"
        f"from fake_nvml import FakeGpu, FakeNvml\nnvmlLib = FakeNvml({gpus})\n"
    )
    (folder / "libnvidia-ml.so.1").symlink_to(_ctypes.__file__)  # any library: nothing is called in it
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
