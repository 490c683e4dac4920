"""Tests of the number of threads that libraries use, and of the number of workers that share a host."""

from __future__ import annotations

import subprocess
import sys

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


_LOADED = "import numpy; print(open('/proc/self/maps').read())"
