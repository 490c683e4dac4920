"""The cause of waits for input, as far as measurements prove it; see `StepsTimed`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distlaunch.base.events import StepsTimed

_WORTH_TELLING = 0.1
"""Part of the time of steps."""
_HANDING_OVER_S = 0.5e-3
"""A step: so long it may take to hand over a batch that is there. Small models have steps of that length."""
_ENOUGH_S = 1.0
"""Steps that took less in all say nothing."""
_BEHIND = 1.5
"""Factor above the others' value from which a task is clearly slower."""
_BUSY = 0.8
"""Part of the time of its cores that a task computes: no more threads would help."""
_SHARED = 0.75
"""The same, where input does little: measured 0.80 in a job of small steps with one core a task."""
_IDLE_CORES = 0.5
"""Cores in use on average, at most: who makes examples waits, as for a disk, and does not compute."""
_ONE_CORE = 1.4
"""Cores in use on average, at most, where one thread at a time computes, and steps do a little beside it."""


@dataclass(frozen=True)
class Bottleneck:
    """Input is what training waits for.

    Attributes:
        share: of the time of steps.
        task: whose batches clearly take longer than those of the others; empty: nobody's.
        cause: `map 8.1 ms an example on 2 threads`; empty where it is not proven.
        remedy: what to do about it; empty where that is not known.
        at_least: tasks in lockstep wait in turns, now one for its input, then another: the share is that of one alone.
    """

    share: float
    task: str = ""
    cause: str = ""
    remedy: str = ""
    at_least: bool = False

    @property
    def finding(self) -> str:
        """Return words such as `62 % of the time, map 8.1 ms an example on 2 threads`."""
        where = f" on {self.task}" if self.task else ""
        share = f"{'at least ' * self.at_least}{self.share * 100:.0f} % of the time{where}"
        return ", ".join(filter(None, [share, self.cause]))

    def __str__(self) -> str:
        """Return the finding with its remedy."""
        return "; ".join(filter(None, [self.finding, self.remedy]))


def find_bottleneck(timed: Mapping[str, StepsTimed]) -> Bottleneck | None:
    """Return the bottleneck of the input, or None if no task waits long for it.

    Args:
        timed: the latest times of each task.
    """
    shares = {task: share for task, each in timed.items() if (share := _share(each)) is not None}
    if not shares:
        return None
    most = max(shares, key=lambda task: shares[task])
    share = shares[most]
    if not timed[most].reads_ahead:  # each has steps of its own, and holds nobody up
        share = sum(timed[task].seconds * each for task, each in shares.items())
        share /= sum(timed[task].seconds for task in shares)
    if share < _WORTH_TELLING:
        return None
    # Who waits in each step and who does not is chance where the input of all is equally slow: the one that comes last
    # holds up the others, whose next batch is read meanwhile. What its batches take is not.
    slow = _slower({task: each.batches_s / each.steps for task, each in timed.items() if each.steps})
    together = timed[most].reads_ahead and len(shares) > 1
    return Bottleneck(share, most if most in slow else "", *_cause(timed[most]), at_least=together)


def stragglers(timed: Mapping[str, StepsTimed]) -> dict[str, float]:
    """Return workers whose own steps are clearly slower, with the factor relative to the others."""
    return _slower({task: each.step_median_s for task, each in timed.items() if not each.reads_ahead})


def _slower(values: Mapping[str, float]) -> dict[str, float]:
    """Return the tasks whose value is clearly above the median of the others, with the factor."""
    found: dict[str, float] = {}
    for task, value in values.items():
        others = [other for name, other in values.items() if name != task]
        usual = statistics.median(others) if others else 0.0
        if usual and value > _BEHIND * usual:
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
        "tasks": {task: task_summary(each) for task, each in sorted(timed.items())},
    }


def task_summary(each: StepsTimed) -> dict[str, Any]:
    """Return the times of one task, for comparison."""
    return {
        "steps": each.steps,
        "step_median_s": each.step_median_s,
        "step_p99_s": each.step_p99_s,
        "examples_per_s": each.examples / each.seconds if each.seconds else None,
        "input_share": each.input_s / each.seconds if each.seconds else None,
        "example_s": each.made_s / each.made if each.made else None,
        "threads": each.threads,
    }


def _share(each: StepsTimed) -> float | None:
    """Return the share of its steps in which a task waited for input; None if it is too early to know."""
    if each.seconds < _ENOUGH_S or not each.steps:
        return None
    return each.input_s / each.seconds if each.input_s / each.steps > _HANDING_OVER_S else 0.0


def _cause(each: StepsTimed) -> tuple[str, str]:
    """Return what takes the time, and the remedy."""
    # who reads ahead has at most all the time for it, who does not has that in which the step waits
    reading_s = each.seconds if each.reads_ahead else each.input_s
    if each.work and each.made and each.batches_s >= reading_s / 2:
        # the examples by themselves explain less than half of it
        if each.made_s / each.threads < each.batches_s / 2:
            # reading many at once, or joining what was made: which of the two is not measured
            return f"making batches {milliseconds(each.batches_s / each.made)} an example", ""
        cost = f"{each.work} {milliseconds(each.made_s / each.made)} an example {_where(each)}"
        return cost, _more_threads(each)
    if each.from_pipeline and each.input_s - each.batches_s >= each.input_s / 2:
        remedy = (
            "move costly work into `data.map`, which maps only the rows that each process needs, "
            "or give examples by number"
        )
        return "most of it in the data function's tf.data pipeline", remedy
    if not each.work and each.cpu_s >= _SHARED * each.cores * each.seconds:
        # nothing is idle while a batch is waited for: whoever makes it has no core at that moment
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
    if each.cpu_s >= _BUSY * each.cores * each.seconds:
        return f"{_busy(each)}: use more workers, or do a part of the work once, in prepared files"
    if each.cpu_s <= _IDLE_CORES * each.seconds:
        return f"the threads wait and do not compute: set `data.threads: {each.threads * 4}`"
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
