"""Finds out from measurements whether training waits for input, and why; see `StepsTimed`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distlaunch.base.events import StepsTimed

_MIN_WAITED_FRACTION = 0.1
"""Smallest fraction of the time of steps for which waiting for input is reported."""
_HANDOVER_S = 0.5e-3
"""Time per step that handing over a loaded batch may take. A shorter wait is not reported, since whole steps of small
models are that short."""
_MIN_TIMED_S = 1.0
"""Smallest total time of steps, in seconds, for which the times are meaningful."""
_SLOWER_FACTOR = 1.5
"""A task counts as clearly slower if its value is more than this many times the median of the others."""
_MIN_DELAYED_FRACTION = 0.15
"""Smallest fraction of the time of steps by which a task must delay the others to be named."""
_BUSY_FRACTION = 0.8
"""If a task computes for more than this fraction of the time of its cores, more threads would not help."""
_BUSY_WITH_STEPS_FRACTION = 0.75
"""If a task without work for single examples computes for more than this fraction, all its cores are busy.

Measured: 0.80 in a job of small steps with one core per task.
"""
_IDLE_CORES = 0.5
"""Largest average number of busy cores at which the threads that make examples mostly wait, for example for a disk."""
_ONE_CORE = 1.4
"""Largest average number of busy cores at which only one thread computes at a time. Steps add a little to 1."""


@dataclass(frozen=True)
class Bottleneck:
    """The finding that training waits for input.

    Attributes:
        fraction: the fraction of the time of steps in which training waits.
        task: the task whose batches clearly take longer than those of the others; empty if there is none.
        cause: words such as `map 8.1 ms an example on 2 threads`; empty if the cause is not proven.
        remedy: what to do about it; empty if unknown.
        at_least: True if `fraction` is a lower limit. Tasks in lockstep wait for each other's input, but the fraction
            is that of a single task.
    """

    fraction: float
    task: str = ""
    cause: str = ""
    remedy: str = ""
    at_least: bool = False

    @property
    def finding(self) -> str:
        """Return words such as `62 % of the time, map 8.1 ms an example on 2 threads`."""
        where = f" on {self.task}" if self.task else ""
        fraction = f"{'at least ' * self.at_least}{self.fraction * 100:.0f} % of the time{where}"
        return ", ".join(filter(None, [fraction, self.cause]))

    def __str__(self) -> str:
        """Return the finding with its remedy."""
        return "; ".join(filter(None, [self.finding, self.remedy]))


def find_bottleneck(timed: Mapping[str, StepsTimed]) -> Bottleneck | None:
    """Return the bottleneck of the input, or None if no task waits long for it.

    Args:
        timed: the latest times of each task.
    """
    fractions = {task: fraction for task, each in timed.items() if (fraction := waited_fraction(each)) is not None}
    if not fractions:
        return None
    most = max(fractions, key=lambda task: fractions[task])
    fraction = fractions[most]
    # workers that do not read ahead make steps independently: they do not wait for each other, so take the mean
    if not timed[most].reads_ahead:
        fraction = sum(timed[task].seconds * each for task, each in fractions.items())
        fraction /= sum(timed[task].seconds for task in fractions)
    if fraction < _MIN_WAITED_FRACTION:
        return None
    # Find a slow task by the time that its batches take, not by the time that it waits. If the input of all tasks is
    # equally slow, chance decides which of them waits in a step: the others read their next batch while they wait for
    # the last one.
    slow = _clearly_slower({task: each.batches_s / each.steps for task, each in timed.items() if each.steps})
    in_lockstep = timed[most].reads_ahead and len(fractions) > 1
    return Bottleneck(fraction, most if most in slow else "", *_cause(timed[most]), at_least=in_lockstep)


def stragglers(timed: Mapping[str, StepsTimed]) -> dict[str, float]:
    """Return the workers that make steps independently and are clearly slower than the others, with the factor."""
    return _clearly_slower({task: each.step_median_s for task, each in timed.items() if not each.reads_ahead})


def delays(timed: Mapping[str, StepsTimed]) -> dict[str, float]:
    """Return the task that the others wait for, with the fraction of the time of steps in which they do.

    Tasks in lockstep have the same step times. But a task whose own gradients are ready late finds those of the others
    ready, so only the others have waited. All tasks wait for the transfer, which cancels out.
    """
    waits = {task: each.peers_s for task, each in timed.items() if each.peers_s is not None}
    # take the longest time: a task with other work between steps has a shorter one, as the others wait in their steps
    seconds = max((each.seconds for each in timed.values()), default=0.0)
    if len(waits) < 2 or seconds < _MIN_TIMED_S:
        return {}
    last = min(waits, key=lambda task: waits[task])
    delay = (min(wait for task, wait in waits.items() if task != last) - waits[last]) / seconds
    return {last: delay} if delay >= _MIN_DELAYED_FRACTION else {}


def slow_tasks(timed: Mapping[str, StepsTimed], hosts: Mapping[str, str]) -> list[str]:
    """Return a text for each task that is slower than the others, such as `worker:1 takes 2.1 times as long ...`.

    Args:
        timed: the latest times of each task.
        hosts: the host of each task; it is named if the tasks run on several hosts.
    """

    def named(task: str) -> str:
        return f"{task} on {hosts[task]}" if hosts.get(task) and len(set(hosts.values())) > 1 else task

    found = [f"{named(task)} takes {by:.1f} times as long as the others" for task, by in stragglers(timed).items()]
    late = [f"the others wait for {named(task)} {by * 100:.0f} % of the time" for task, by in delays(timed).items()]
    return found + late


def _clearly_slower(values: Mapping[str, float]) -> dict[str, float]:
    """Return the tasks whose value is clearly above the median of the others, with the factor."""
    found: dict[str, float] = {}
    for task, value in values.items():
        others = [other for name, other in values.items() if name != task]
        usual = statistics.median(others) if others else 0.0
        if usual and value > _SLOWER_FACTOR * usual:
            found[task] = value / usual
    return found


def summary(timed: Mapping[str, StepsTimed]) -> dict[str, Any] | None:
    """Return the times of steps for `--json`, or None if no task has reported any."""
    if not timed:
        return None
    found = find_bottleneck(timed)
    return {
        "input": str(found) if found else None,
        "stragglers": stragglers(timed),
        "delays": delays(timed),
        "tasks": {task: task_summary(each) for task, each in sorted(timed.items())},
    }


def task_summary(each: StepsTimed) -> dict[str, Any]:
    """Return the times of one task for `--json`."""
    return {
        "steps": each.steps,
        "step_median_s": each.step_median_s,
        "step_p99_s": each.step_p99_s,
        "examples_per_s": each.examples / each.seconds if each.seconds else None,
        "input_share": each.input_s / each.seconds if each.seconds else None,
        "peers_share": each.peers_s / each.seconds if each.seconds and each.peers_s is not None else None,
        "example_s": each.made_s / each.made if each.made else None,
        "threads": each.threads,
        "cores": each.cpu_s / each.seconds if each.seconds else None,
        "memory_bytes": each.memory_bytes or None,
        "gpu_percent": each.gpu_percent,
        "gpu_memory_bytes": each.gpu_memory_bytes or None,
    }


def resources(each: StepsTimed) -> dict[str, float]:
    """Return the memory of a task in MB, and the use of its GPUs, by name; unknown values are left out."""
    found: dict[str, float] = {}
    if each.memory_bytes:
        found["memory_mb"] = each.memory_bytes / 1e6
    if each.gpu_percent is not None:
        found["gpu_percent"] = each.gpu_percent
    if each.gpu_memory_bytes:
        found["gpu_memory_mb"] = each.gpu_memory_bytes / 1e6
    return found


def waited_fraction(each: StepsTimed) -> float | None:
    """Return the fraction of its time in which a task waited for input; None if it is too early to know."""
    if each.seconds < _MIN_TIMED_S or not each.steps:
        return None
    return each.input_s / each.seconds if each.input_s / each.steps > _HANDOVER_S else 0.0


def _cause(each: StepsTimed) -> tuple[str, str]:
    """Return the cause of the wait and the remedy, each empty if unknown."""
    # a task that reads ahead can read all the time; others read only while the step waits
    reading_s = each.seconds if each.reads_ahead else each.input_s
    if each.work and each.made and each.batches_s >= reading_s / 2:
        # making the single examples takes less than half of the time
        if each.made_s / each.threads < each.batches_s / 2:
            # the rest is reading many examples at once or joining examples to a batch, which is not measured separately
            return f"making batches {milliseconds(each.batches_s / each.made)} an example", ""
        cost = f"{each.work} {milliseconds(each.made_s / each.made)} an example {_where(each)}"
        return cost, _more_threads(each)
    if each.from_pipeline and each.input_s - each.batches_s >= each.input_s / 2:
        remedy = (
            "move costly work into `data.map`, which maps only the rows that each process needs, "
            "or give examples by number"
        )
        return "most of it in the data function's tf.data pipeline", remedy
    if not each.work and each.cpu_s >= _BUSY_WITH_STEPS_FRACTION * each.cores * each.seconds:
        # all cores are busy while the step waits: the thread that makes the batch has no core
        return f"{_busy(each)} with steps and input together", ""
    return "", ""


def _more_threads(each: StepsTimed) -> str:
    if each.processes:
        enough = each.processes >= each.cores
        return "" if enough else f"set `data.processes: {each.cores}`, there are {each.cores} cores"
    if each.in_python and 1 < each.cores <= each.threads and _computes_on_one_core(each):
        return f"Python code computes on one core at a time: set `data.processes: {each.cores}`"
    if each.threads < each.cores:
        return f"set `data.threads: {each.cores}`, there are {each.cores} cores"
    if each.cpu_s >= _BUSY_FRACTION * each.cores * each.seconds:
        return f"{_busy(each)}: use more workers, or store the result of a part of the work in files"
    if each.cpu_s <= _IDLE_CORES * each.seconds:
        return f"the threads mostly wait: set `data.threads: {each.threads * 4}`"
    return ""


def _busy(each: StepsTimed) -> str:
    return f"all {each.cores} cores are busy" if each.cores > 1 else "its core is busy"


def _computes_on_one_core(each: StepsTimed) -> bool:
    return _IDLE_CORES * each.seconds < each.cpu_s < _ONE_CORE * each.seconds


def _where(each: StepsTimed) -> str:
    if each.processes:
        return "in 1 process" if each.processes == 1 else f"in {each.processes} processes"
    return "on 1 thread" if each.threads == 1 else f"on {each.threads} threads"


def milliseconds(seconds: float) -> str:
    """Format milliseconds: `0.042 ms`, `8.1 ms`, `1,234.5 ms`."""
    value = seconds * 1000
    return f"{value:,.1f} ms" if value >= 0.1 else f"{value:.2g} ms"
