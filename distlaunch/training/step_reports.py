"""The progress of training as events: how many steps were done, in what time, and the values of the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distlaunch.base.events import Event, StepsDone
from distlaunch.checkpoints.meta import Progress
from distlaunch.strategies.protocol import CallResult, Logs

REPORT_INTERVAL_S = 0.5  # between two StepsDone events, unless the config says after how many steps


@dataclass(frozen=True)
class Every:
    """Due at multiples of `steps`; None: never."""

    steps: int | None

    def steps_until_due(self, step: int) -> int | None:
        """How many steps may run from `step` before this is due again; None: no limit."""
        return None if self.steps is None else self.steps - step % self.steps

    def due_at_step(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


class StepReports:
    """Collects steps, and reports those since the last report when it is time.

    Args:
        emit: where the reports go.
        every: after how many steps; None: about twice a second.
        clock: monotonic seconds.
    """

    def __init__(self, emit: Callable[[Event], None], every: int | None, clock: Callable[[], float]) -> None:
        self._emit, self._clock = emit, clock
        self._every = Every(every)
        self._steps, self._seconds = 0, 0.0
        self._last = clock()

    def steps_until_due(self, step: int) -> int | None:
        """How many steps may run from `step` before the next report; None: no limit."""
        return self._every.steps_until_due(step)

    def add(self, result: CallResult, seconds: float, at: Progress, *, at_end: bool) -> None:
        """A call has been made.

        Args:
            seconds: that it took.
            at: where training stands now.
            at_end: it was the last of an epoch, so that these steps are reported in any case.
        """
        self._steps += result.steps
        self._seconds += seconds
        if at_end or self._is_due(at.step):
            self._report(result.logs, at)

    def report_rest(self, logs: Logs, at: Progress) -> None:
        """Reports steps that were not reported yet, if there are any."""
        if self._steps:
            self._report(logs, at)

    def _is_due(self, step: int) -> bool:
        if self._every.steps is not None:
            return self._every.due_at_step(step)
        return self._clock() - self._last > REPORT_INTERVAL_S

    def _report(self, logs: Logs, at: Progress) -> None:
        self._emit(
            StepsDone(
                epoch=at.epoch,
                step=at.step,
                step_in_epoch=at.step_in_epoch,
                steps=self._steps,
                seconds=self._seconds,
                logs=scalars(logs),
            )
        )
        self._steps, self._seconds, self._last = 0, 0.0, self._clock()


def scalars(logs: Logs) -> Logs:
    """The values that are single numbers, as floats that JSON can hold."""
    return {name: float(value) for name, value in logs.items() if np.size(value) == 1}
