"""How tasks share the cores of a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from distlaunch.cluster.cores import POOL_SIZES, num_visible_cores, pool_sizes
from distlaunch.cluster.spec import EVALUATOR, ClusterSpec, Task

CORES = num_visible_cores()


@pytest.mark.parametrize("num_tasks", [2, 3, 8, 1000])
def test_each_gets_its_share(num_tasks: int) -> None:
    share = max(1, CORES // num_tasks)
    expected = {} if share == CORES else dict.fromkeys(POOL_SIZES, str(share))
    assert pool_sizes(num_tasks) == expected


def test_one_task_has_all_that_it_sees() -> None:
    assert pool_sizes(1) == pool_sizes(0)
    assert set(pool_sizes(1).values()) <= {str(CORES - 1)}, "but for what a container's limit takes"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_what_a_scheduler_has_bound_is_shared() -> None:
    code = """
import json, os, sys
from distlaunch.cluster.cores import pool_sizes
from distlaunch.cluster.cores import num_visible_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(json.dumps([num_visible_cores(), pool_sizes(1), pool_sizes(4)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1, {}, {}], "libraries see one core by themselves"


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
