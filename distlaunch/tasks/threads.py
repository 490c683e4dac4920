"""The threads of this process: their number, and a limit for OpenBLAS.

OpenBLAS reads its number of threads when it is loaded, so a forked task sets it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading

from distlaunch.base.unlisted_threads import num_unlisted

_SETTERS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_")  # fmt: skip
"""Names of the setter: builds with 64-bit integers have a suffix, those in NumPy's and SciPy's wheels a prefix."""
_NAMES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables in OpenBLAS's own order (its README, "Setting the number of threads at runtime")."""


def limit_openblas_threads() -> None:
    """Set each loaded OpenBLAS to the number of threads that the environment asks for."""
    number = next((int(text) for name in _NAMES if (text := os.environ.get(name, "")).isdecimal() and int(text)), None)
    if number is None:
        return
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for path in set(re.findall(r"\s(/\S*openblas\S*\.so\S*)$", file.read(), re.MULTILINE)):
            library = ctypes.CDLL(path)
            for name in _SETTERS:
                if (setter := getattr(library, name, None)) is not None:
                    setter(number)


_SURVIVE_FORKS = ("jemalloc_bg_thd",)
"""Names of threads that may exist when a process forks. pyarrow, which Keras imports with pandas, contains jemalloc. It
takes its locks before a fork, and gives up its thread in the child (`background_thread_postfork_child`)."""


def num_threads() -> int:
    """Return the number of threads of this process, including those of native code, which Python does not list.

    A process that forks must have only one: another might hold a lock. Threads that cannot do harm are not counted.
    """
    return sum(_name(thread) not in _SURVIVE_FORKS for thread in os.listdir("/proc/self/task"))


def _name(thread: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
        return file.read().strip()
    return ""  # it has ended


def num_foreign_threads() -> int:
    """Return the number of threads that native code has started in this process; it must be 0 for a fork."""
    return num_threads() - threading.active_count() - num_unlisted()
