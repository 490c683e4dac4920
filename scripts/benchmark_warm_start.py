"""Measures how long tasks need until they can build a model: as fresh processes, and forked from a warm process.

    python scripts/benchmark_warm_start.py [--backend tensorflow] [--rounds 5] [--tasks 8]

Prints the seconds from the start of a task until its imports are done, their processor time, and two ratios: a warm
task relative to a cold one, and many tasks at once relative to one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distlaunch.agent.host import HostTasks
from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.plan.train import READ_LATE

DEADLINE_S = 600
TASK = """
import sys, time
from distlaunch.tasks import preload
assert preload.main(sys.argv[1:]) == ""
print(time.time(), time.process_time(), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="tensorflow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=8)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, WarmStarts().kept() as pool:
        os.chdir(name)
        Path("ready.py").write_text(TASK)
        start(pool, words.backend, 1, warm=True)  # makes the warm process
        kinds: dict[str, Callable[[], tuple[float, float]]] = {
            "one, cold": lambda: start(pool, words.backend, 1, warm=False),
            "one, warm": lambda: start(pool, words.backend, 1, warm=True),
            f"{words.tasks}, cold": lambda: start(pool, words.backend, words.tasks, warm=False),
            f"{words.tasks}, warm": lambda: start(pool, words.backend, words.tasks, warm=True),
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(words.rounds):
            for kind, measure in kinds.items():
                found[kind].append(measure())
    median = {kind: statistics.median(seconds for seconds, _ in each) for kind, each in found.items()}
    for kind, each in found.items():
        cpu = statistics.median(cpu for _, cpu in each)
        print(f"{kind:12} {median[kind]:8.3f} s until all are ready, {cpu:8.3f} s of processor time each")
    print(f"one task, warm / cold: {median['one, warm'] / median['one, cold']:.3f}")
    for how in ("warm", "cold"):
        print(f"{words.tasks} tasks / one, {how}: {median[f'{words.tasks}, {how}'] / median[f'one, {how}']:.2f}")
    print(f"{words.tasks} warm / one cold: {median[f'{words.tasks}, warm'] / median['one, cold']:.2f}")


def start(pool: WarmStarts, backend: str, number: int, *, warm: bool) -> tuple[float, float]:
    """Return the seconds until the last task is ready, and the mean processor time of the tasks in seconds."""
    what = Preload("distlaunch.tasks.preload", (backend,), READ_LATE) if warm else None
    with HostTasks(lambda task, line: None, time.monotonic, pool) as tasks:
        began = time.time()
        specs = [_spec(str(index), backend, what) for index in range(number)]
        started = [tasks.start(spec) for spec in specs]
        while any(task.poll() is None for task in started):
            if time.time() - began > DEADLINE_S:
                raise SystemExit("the tasks have not ended in time")
            tasks.wait(0.05)
    told = [_told(spec) for spec in specs]
    return max(at for at, _ in told) - began, statistics.mean(cpu for _, cpu in told)


def _spec(name: str, backend: str, what: Preload | None) -> TaskSpec:
    argv = (sys.executable, "-m", "ready", backend)
    return TaskSpec(name, argv, dict(os.environ), Path(f"{name}.out"), Path(f"{name}.err"), Path("heartbeat"), what)


def _told(spec: TaskSpec) -> Sequence[float]:
    """Return when a task was ready, and its processor time, from the last line of its log."""
    at, cpu = map(float, spec.stdout_log.read_text().splitlines()[-1].split())
    return at, cpu


if __name__ == "__main__":
    main()
