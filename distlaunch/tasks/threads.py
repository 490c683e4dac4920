"""The threads of this process: their number, and a limit for OpenBLAS.

OpenBLAS reads its number of threads when it is loaded, so a forked task sets it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from typing import Any

from distlaunch.base.unlisted_threads import num_unlisted

_FORMS = ("{}", "{}64_", "scipy_{}", "scipy_{}64_")
"""Forms of names in OpenBLAS: a suffix for 64-bit integers, a prefix in the wheels of NumPy and SciPy."""
_PTHREADS = 1
"""Result of `openblas_get_parallel` for a build with a pool of threads of its own."""
_NAMES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables in OpenBLAS's own order (its README, "Setting the number of threads at runtime")."""


def limit_openblas_threads() -> None:
    """Set each loaded OpenBLAS to the number of threads that the environment asks for."""
    number = next((int(text) for name in _NAMES if (text := os.environ.get(name, "")).isdecimal() and int(text)), None)
    if number is None:
        return
    for library in _openblas_libraries():
        if (setter := _function(library, "openblas_set_num_threads")) is not None:
            setter(number)


def num_openblas_threads() -> int:
    """Return the number of threads in the pools of all loaded copies of OpenBLAS; call it in an unforked process.

    OpenBLAS starts a pool with a thread per core when it is loaded. It ends the pool before a fork, and starts it again
    when it is needed (`blas_thread_shutdown` as a handler of pthread_atfork(3)).
    """
    found = 0
    for library in _openblas_libraries():
        parallel = _function(library, "openblas_get_parallel")
        number = _function(library, "openblas_get_num_threads")
        if parallel is not None and number is not None and parallel() == _PTHREADS:
            found += max(number() - 1, 0)  # the calling thread is one of them
    return found


def _openblas_libraries() -> list[ctypes.CDLL]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = set(re.findall(r"\s(/\S*openblas\S*\.so\S*)$", file.read(), re.MULTILINE))
    except OSError:
        return []
    return [ctypes.CDLL(path) for path in paths]


def _function(library: ctypes.CDLL, name: str) -> Any:
    return next((found for form in _FORMS if (found := getattr(library, form.format(name), None)) is not None), None)


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
