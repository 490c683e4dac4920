"""The hardware of a host is read from files of the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.cluster.cgroup import available_memory, cpu_limit
from distlaunch.cluster.hardware import INJECTED, Hardware, node_cores, parse_hardware, read_hardware
from distlaunch.cluster.machine import Machine


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_this_host() -> None:
    found = read_hardware({"OMP_NUM_THREADS": "3", "HOME": "/"}, ("0", "1"))
    assert (found.system, found.architecture) == (sys.platform, os.uname().machine)
    assert found.gpus == ("0", "1")
    assert found.environ == {"OMP_NUM_THREADS": "3"}
    assert 1 <= found.num_cores <= len(found.usable_cores) <= found.logical_cores
    assert parse_hardware(json.loads(json.dumps(found._asdict()))).features == list(found.features)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_cores_to_which_a_scheduler_has_bound_the_process() -> None:
    code = """
import os
from distlaunch.cluster.hardware import read_hardware
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(read_hardware({}, ()).num_cores)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_injected_facts_replace_what_is_read() -> None:
    machine = Machine({INJECTED: '{"features": ["avx2"], "cpu": "EPYC 7763"}', "CUDA_VISIBLE_DEVICES": "-1"})
    assert (machine.hardware.features, machine.hardware.cpu) == (["avx2"], "EPYC 7763")
    assert machine.hardware.logical_cores == os.cpu_count()


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "800000 100000"}, 4),
        ("0::/a", {"a/cpu.max": "1000 100000"}, 1),
        ("0::/the/hosts/path", {"cpu.max": "300000 100000"}, 3),  # within a container
        ("0::/", {"cpu.max": "what?"}, None),
        ("4:cpu,cpuacct:/x\n0::/",
         {"cpu,cpuacct/x/cpu.cfs_quota_us": "150000", "cpu,cpuacct/x/cpu.cfs_period_us": "50000"}, 3),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/", {"cpuset/cpu.cfs_quota_us": "100000", "cpuset/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {}, None),
    ],
)  # fmt: skip
def test_the_limit_of_a_container(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int | None) -> None:
    _file(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        _file(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu_limit(tmp_path) == expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None
    assert available_memory(tmp_path) > 10**7


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a", {"a/memory.max": "max\n", "a/memory.current": "3\n", "a/memory.stat": ""}, None),
        # cached files count as free
        ("0::/", {"memory.max": "9000\n", "memory.current": "8000\n",
                  "memory.stat": "anon 1\ninactive_file 500\n"}, 1500),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "1", "a/memory.stat": "", "memory.max": "5",
                   "memory.current": "9", "memory.stat": ""}, 0),
        ("4:memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "700", "memory/x/memory.usage_in_bytes": "600",
                               "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n"}, 150),
    ],
)  # fmt: skip
def test_the_memory_of_a_container(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int | None) -> None:
    _file(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        _file(tmp_path / "sys/fs/cgroup" / name, text)
    found = available_memory(tmp_path)
    assert found > 10**7 if expected is None else found == expected


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number, text in enumerate(["0-1,16"] + [str(number) for number in range(2, 12)]):
        _file(tmp_path / f"node{number}" / "cpulist", text)
    _file(tmp_path / "possible", "0")
    assert node_cores(tmp_path)[:3] == [[0, 1, 16], [2], [3]]
    assert node_cores(tmp_path)[-1] == [11]
    assert node_cores(tmp_path / "none") == []
    (tmp_path / "node3" / "cpulist").write_text("what?\n")
    assert node_cores(tmp_path) == []


@pytest.mark.parametrize("changes", [{"cpu": 3}, {"cpu_limit": "2"}, {"numa_nodes": [0]}, {"environ": {"A": 1}}])
def test_facts_of_a_host_that_are_malformed(changes: dict[str, object]) -> None:
    plain = Hardware()._asdict()
    assert parse_hardware(plain) == Hardware()
    with pytest.raises(ValueError, match=f"hardware: {next(iter(changes))}: got"):
        parse_hardware({**plain, **changes})
    for wrong in (None, {}, {**plain, "more": 1}):
        with pytest.raises(ValueError, match="hardware: got"):
            parse_hardware(wrong)
