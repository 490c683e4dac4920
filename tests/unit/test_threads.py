"""Tests of the number of threads that libraries use, and of the number of workers that share a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from distlaunch.cluster.spec import EVALUATOR, ClusterSpec, Task


def test_workers_on_the_host_of_a_task() -> None:
    cluster = ClusterSpec({"worker": ("a:1", "b:1", "a:2"), "ps": ("a:3", "c:1")})
    tasks = [Task("worker", 0), Task("worker", 1), Task("ps", 0), Task("ps", 1), EVALUATOR]
    assert [cluster.num_workers_beside(task) for task in tasks] == [2, 1, 2, 1, 1]


def test_openblas_heeds_what_is_said_after_it_was_loaded() -> None:
    code = """
import ctypes, os, re, numpy
from distlaunch.tasks.threads import limit_openblas_threads
paths = re.findall(r"(/\\S*openblas\\S*\\.so\\S*)$", open("/proc/self/maps").read(), re.MULTILINE)
library = ctypes.CDLL(paths[0])
names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
get = next(getattr(library, name) for name in names if hasattr(library, name))
both = {"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}
for environ in (both, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "x"}):
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    os.environ.update(environ)
    limit_openblas_threads()
    print(get())
"""
    if "openblas" not in subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True).stdout:
        pytest.skip("this NumPy computes with another library")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "2", "2"]


POOLS = """
import ctypes, os, shutil, sys
import numpy, scipy.linalg
from distlaunch.tasks.threads import num_openblas_threads, num_threads
print(num_threads() - 1, num_openblas_threads())
paths = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
copy = os.path.join(sys.argv[1], "libopenblas-another.so")
shutil.copy(sorted(paths)[0], copy)
ctypes.CDLL(copy)
print(num_threads() - 1, num_openblas_threads())
"""


def test_pools_of_all_copies_of_openblas_are_known(tmp_path: Path) -> None:
    """Any package may contain one, as OpenCV does; their pools do not prevent a fork."""
    pytest.importorskip("scipy")
    if "openblas" not in subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True).stdout:
        pytest.skip("this NumPy computes with another library")
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    # the copy needs the libraries that are beside the original
    folder = next(Path(numpy.__file__).parents[1].glob("numpy.libs"), tmp_path)
    environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), environ.get("LD_LIBRARY_PATH", "")])
    command = [sys.executable, "-c", POOLS, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60, env=environ)
    (threads, known), (more_threads, more_known) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (threads, more_threads) == (known, more_known)
    assert more_known == threads + 1 > 1


_LOADED = "import numpy; print(open('/proc/self/maps').read())"

ARROW = """
import os
import numpy  # its OpenBLAS has threads, too
from distlaunch.tasks.threads import num_threads
before = num_threads()
import pyarrow
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print("jemalloc_bg_thd" in names, num_threads() - before, flush=True)
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    pool = pyarrow.jemalloc_memory_pool()
    for size in (10, 100_000, 10):
        pyarrow.array(range(size), memory_pool=pool)
    os._exit(0 if pool.max_memory() > 100_000 else 1)
"""


def test_the_allocator_of_arrow_does_not_prevent_a_fork() -> None:
    """Keras imports pandas, and pandas imports pyarrow, whose jemalloc starts a thread and works in a forked child."""
    pytest.importorskip("pyarrow")
    done = subprocess.run([sys.executable, "-c", ARROW], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    has_thread, more, code = done.stdout.split()
    if has_thread == "False":
        pytest.skip("this pyarrow is built without jemalloc")
    assert (more, code) == ("0", "0")
