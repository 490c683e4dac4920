"""Measures what many hosts cost: agents and trivial tasks on this machine, relative to as many bare processes.

    python scripts/benchmark_hosts.py [--hosts 8,16,32,64] [--slots 8] [--output-mb 100] [--idle-s 20]

A program in place of `ssh` starts each agent on this machine, so all agents share its cores, unlike on real hosts. For
each number of hosts, the script prints:
- the time until all tasks run at the same time, and its ratio to the time of bare processes;
- the maximum memory of the controller;
- the share of a core that the controller uses while the tasks do nothing;
- whether the logs have all output of the tasks, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from distlaunch.base.run_dir import RunDir

_SSH = """#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""
_ENTRY = "from distlaunch.cli.main import main; main()"
_TASK = """
import os, sys, time
folder, number, lines = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(os.path.join(folder, "up"), "ab", buffering=0) as file:
    file.write(b"+")
while os.stat(os.path.join(folder, "up")).st_size < number or not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.2)
name = os.environ.get("DISTLAUNCH_TASK", "")
for line in range(lines):
    print(f"{name} line {line} " + "x" * 80)
"""
_LIMIT_S = 600.0


@dataclass
class Cost:
    """The cost of one job."""

    up_s: float
    all_s: float
    memory_bytes: int
    share: float
    wrong_logs: int


def _wait_up(folder: Path, number: int, process: psutil.Process | None) -> int:
    """Wait until all tasks are up; return the maximum memory of the process in this time."""
    until, most = time.monotonic() + _LIMIT_S, 0
    while (folder / "up").stat().st_size < number:
        if time.monotonic() > until or (process is not None and process.status() == psutil.STATUS_ZOMBIE):
            raise SystemExit(f"only {(folder / 'up').stat().st_size} of {number} tasks have come up")
        most = max(most, process.memory_info().rss if process is not None else 0)
        time.sleep(0.02)
    return most


def bare(folder: Path, script: Path, number: int) -> float:
    """Return the seconds until a number of bare processes are up, which one process starts one after the other."""
    began = time.monotonic()
    (folder / "up").write_bytes(b"")
    (folder / "go").touch()
    words = [sys.executable, str(script), str(folder), str(number), "0"]
    children = [subprocess.Popen(words) for _ in range(number)]
    _wait_up(folder, number, None)
    seconds = time.monotonic() - began
    for child in children:
        child.wait()
    (folder / "go").unlink()
    return seconds


def launched(folder: Path, script: Path, hosts: int, slots: int, output_mb: float, idle_s: float) -> Cost:
    """Run the tasks with distlaunch, and return the cost."""
    number = hosts * slots
    (folder / "up").write_bytes(b"")
    lines = round(output_mb * 1e6 / number / 100)
    named = ",".join(f"host{each} slots={slots}" for each in range(hosts))
    words = ["run", "--hosts", named, "--workers", str(number), "--runs-dir", str(folder / "runs"), "--name",
             f"of-{hosts}", str(script), str(folder), str(number), str(lines)]  # fmt: skip
    environ = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    began = time.monotonic()
    with (folder / "said").open("wb") as said:
        job = subprocess.Popen([sys.executable, "-c", _ENTRY, *words], env=environ, cwd=folder / "work",
                               stdout=said, stderr=subprocess.STDOUT)  # fmt: skip
    controller = psutil.Process(job.pid)
    most = _wait_up(folder, number, controller)
    up_s = time.monotonic() - began
    used = sum(controller.cpu_times()[:2])
    time.sleep(idle_s)
    share = (sum(controller.cpu_times()[:2]) - used) / idle_s
    (folder / "go").touch()
    while job.poll() is None:
        try:
            most = max(most, controller.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    (folder / "go").unlink()
    all_s = time.monotonic() - began - idle_s
    if job.wait() != 0:
        raise SystemExit((folder / "said").read_text()[-4000:])
    return Cost(up_s, all_s, most, share, _wrong_logs(RunDir(folder / "runs" / f"of-{hosts}"), number, lines))


def _wrong_logs(run: RunDir, number: int, lines: int) -> int:
    tasks = run.tasks(0)
    wrong = abs(number - len(tasks))
    for name, files in tasks.items():
        told = "".join(f"{name} line {line} " + "x" * 80 + "\n" for line in range(lines)).encode()
        wrong += hashlib.sha256(files.stdout_log.read_bytes()).digest() != hashlib.sha256(told).digest()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=lambda text: [int(each) for each in text.split(",")], default=[8, 16, 32, 64])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--output-mb", type=float, default=100)
    parser.add_argument("--idle-s", type=float, default=20)
    words = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        for each in ("bin", "work"):
            (folder / each).mkdir()
        (folder / "bin" / "ssh").write_text(_SSH)
        (folder / "bin" / "ssh").chmod(0o755)
        script = folder / "task.py"
        script.write_text(_TASK)
        print("hosts tasks   bare s     up s  ratio    all s  controller MB  share of a core  wrong logs")
        for hosts in words.hosts:
            number = hosts * words.slots
            alone = bare(folder, script, number)
            cost = launched(folder, script, hosts, words.slots, words.output_mb, words.idle_s)
            wrong += cost.wrong_logs
            ends = f"{cost.memory_bytes / 1e6:>14.0f} {cost.share:>16.2%} {cost.wrong_logs:>11}"
            times = f"{alone:>8.2f} {cost.up_s:>8.2f} {cost.up_s / alone:>6.2f} {cost.all_s:>8.2f}"
            print(f"{hosts:>5} {number:>5} {times} {ends}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
