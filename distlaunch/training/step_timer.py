"""Sums up the times of a task's steps, and reports them at intervals."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import psutil

from distlaunch.base.events import Event, Notice, StepsTimed
from distlaunch.cluster.cores import num_cores
from distlaunch.cluster.gpus import GpuMeter
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.examples.each_example import num_threads
from distlaunch.data.examples.example_times import ExampleTimes, example_times_so_far
from distlaunch.data.examples.pending_events import take_events
from distlaunch.data.split import Split
from distlaunch.strategies.step_times import StepTimes

FIRST_INTERVAL_S = 0.1  # until the first report; the interval grows, so that a short run has several reports
GROWTH = 1.5
INTERVAL_S = 5.0  # largest interval between reports, each of which is an event in a file
_LATEST = 1_000  # number of steps for the reported median and 99th percentile
_MISSING_STEPS, _MISSING_SHARE = 2.0, 0.1  # tolerated missing examples: full batches, plus a fraction of all


class StepTimer:
    """Step times of one attempt.

    Args:
        emit: called with the reports.
        train: the data that the steps read.
        reads_ahead: see `StepsTimed`.
        clock: returns seconds, to decide when a report is due.
    """

    def __init__(self, emit: Callable[[Event], None], train: Split, config: DataConfig, *, reads_ahead: bool = True,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self._emit, self._train, self._config, self._reads_ahead, self._clock = emit, train, config, reads_ahead, clock
        self._calls, self._steps = 0, 0
        self._seconds, self._input_s, self._examples, self._cpu_s = 0.0, 0.0, 0.0, 0.0
        self._peers_s: float | None = None
        self._latest_step_s: deque[float] = deque(maxlen=_LATEST)
        self._largest: float | None = 0.0 if config.gives_context else None
        self._cpu_before = time.process_time()
        self._made_before = ExampleTimes()
        self._interval_s = FIRST_INTERVAL_S
        self._due_at: float | None = None
        self._has_unreported = False
        self._gpus = GpuMeter(os.environ)

    def begin(self) -> None:
        """Start a call; CPU time used before it does not count as time of a step."""
        self._cpu_before = time.process_time()

    def add(self, times: StepTimes) -> None:
        """Record the times of a call that has ended."""
        for skipped in take_events():
            self._emit(skipped)
        if not times.seconds:
            return
        self._calls += 1
        if self._calls == 1:  # the first call compiles, and starts reading the input
            self._made_before = example_times_so_far()
            self._due_at = self._clock() + self._interval_s
            self._gpus.read()  # begins to measure, for the first report
            self.begin()
            return
        self._steps += len(times.seconds)
        self._seconds += sum(times.seconds)
        self._input_s += times.input_s
        self._examples += times.examples
        if times.peers_s is not None:
            self._peers_s = (self._peers_s or 0.0) + times.peers_s
        self._cpu_s += time.process_time() - self._cpu_before
        self._latest_step_s.extend(times.seconds)
        self._has_unreported = True
        self._check_batch_sizes(times.examples / len(times.seconds))
        self.begin()
        if self._due_at is not None and self._clock() >= self._due_at:
            self.report()

    def _check_batch_sizes(self, examples: float) -> None:
        """Warn once if many batches are smaller than the largest, because some parts of the data end before others.

        Args:
            examples: examples per step in the latest call.
        """
        if self._largest is None:
            return
        self._largest = max(self._largest, examples)
        whole = self._largest * self._steps
        if whole - self._examples > self._largest * (_MISSING_STEPS + _MISSING_SHARE * self._steps):
            self._largest = None
            parts = "the streams" if self._config.streams else "the workers' data"
            message = f"{self._steps:,} steps have read {self._examples:,.0f} examples, but full batches would have "
            message += f"{whole:,.0f}: some of {parts} end before others, and the batches after that are smaller; "
            message += "to keep batches full, give each about the same number of examples"
            self._emit(Notice(level="warning", message=f"data: {message}"))

    def report(self) -> None:
        """Report now, if there is anything new."""
        if not self._has_unreported:
            return
        self._interval_s = min(GROWTH * self._interval_s, INTERVAL_S)
        self._has_unreported, self._due_at = False, self._clock() + self._interval_s
        gpus = self._gpus.read()
        made, latest = example_times_so_far() - self._made_before, list(self._latest_step_s)
        self._emit(
            StepsTimed(
                steps=self._steps,
                seconds=self._seconds,
                examples=self._examples,
                input_s=self._input_s,
                peers_s=self._peers_s,
                step_median_s=float(np.median(latest)),
                step_p99_s=float(np.percentile(latest, 99)),
                cpu_s=self._cpu_s,
                cores=num_cores(),
                work=self._train.work,
                made=made.examples,
                made_s=made.seconds,
                batches_s=made.batches_s,
                threads=num_threads(self._config),
                reads_ahead=self._reads_ahead,
                # false if whole batches are preprocessed, which is not measured and may take most of the time
                from_pipeline=not self._train.by_number
                and self._config.preprocessing is None
                and not self._train.reads_all,
                in_python=self._train.in_python,
                processes=self._config.processes or 0,
                memory_bytes=psutil.Process().memory_info().rss,
                gpu_percent=gpus.percent if gpus else None,
                gpu_memory_bytes=gpus.memory_bytes if gpus else 0,
            )
        )
