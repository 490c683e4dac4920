"""How long the devices of a process have had nothing to do, because the next batch was not there.

JAX returns from a step before the devices have computed it, and the next batch is read meanwhile: what Python waits for
a batch says nothing about the devices. So in one step of a few, Python first waits until the devices are done, and then
for the batch: from there on they wait with it. In that step the copy of the next batch does not overlap with computing,
which is what measuring costs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import jax

from distlaunch.strategies.jax.feed import Feed
from distlaunch.strategies.step_times import StepTimes

_EVERY = 7  # steps, of which one is measured; odd, since two batches may come together, and every other step waits
_LATEST = 8  # measurements whose mean stands for the other steps


class StepClock:
    """Times the steps of one call after the other."""

    def __init__(self) -> None:
        self._steps = 0
        self._measured: deque[float] = deque(maxlen=_LATEST)
        self._ends: list[float] = []
        self._rows = 0

    def begin(self, feed: Feed) -> None:
        """A call begins."""
        self._ends, self._rows = [time.perf_counter()], feed.rows

    def load_ahead(self, feed: Feed, probe: jax.Array) -> None:
        """Reads the next batch; `probe` is there when the devices are done with all steps so far."""
        # the first step compiles, and the two batches that were read meanwhile are taken first
        measures = self._steps % _EVERY == _EVERY // 2
        self._steps += 1
        if measures:
            probe.block_until_ready()
        before = feed.waited_s
        feed.load_ahead()
        if measures:
            self._measured.append(feed.waited_s - before)

    def step_ended(self) -> None:
        """The devices are done with one more step of the call."""
        self._ends.append(time.perf_counter())

    def times(self, feed: Feed, num_processes: int) -> StepTimes:
        """Of the call."""
        seconds = tuple(end - began for began, end in itertools.pairwise(self._ends))
        mean = sum(self._measured) / len(self._measured) if self._measured else 0.0
        # a mean of other steps: never more than this call took
        return StepTimes(seconds, min(mean * len(seconds), sum(seconds)), (feed.rows - self._rows) / num_processes)
