"""Reports the progress of training as events: the number of steps, their duration, and the latest values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distlaunch.base.events import Event, StepsDone
from distlaunch.checkpoints.meta import Progress
from distlaunch.strategies.protocol import CallResult, Logs

REPORT_INTERVAL_S = 0.5  # between two StepsDone events, unless the config says after how many steps


@dataclass(frozen=True)
class StepInterval:
    """Interval of steps, due at multiples of `steps`; never due if None."""

    steps: int | None

    def steps_until_due(self, step: int) -> int | None:
        """Return the number of steps from `step` until this is due again, or None for no limit."""
        return None if self.steps is None else self.steps - step % self.steps

    def due_at_step(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


class StepReports:
    """Collects steps, and reports those since the last report when one is due.

    Args:
        emit: called with the reports.
        every: steps between reports; None for about twice a second.
        clock: returns monotonic seconds.
    """

    def __init__(self, emit: Callable[[Event], None], every: int | None, clock: Callable[[], float]) -> None:
        self._emit, self._clock = emit, clock
        self._every = StepInterval(every)
        self._steps, self._seconds = 0, 0.0
        self._last = clock()

    def steps_until_due(self, step: int) -> int | None:
        """Return the number of steps from `step` until the next report, or None for no limit."""
        return self._every.steps_until_due(step)

    def add(self, result: CallResult, seconds: float, at: Progress, *, at_end: bool) -> None:
        """Record a call.

        Args:
            seconds: duration of the call.
            at: progress after the call.
            at_end: whether the call ended an epoch; its steps are then reported in any case.
        """
        self._steps += result.steps
        self._seconds += seconds
        if at_end or self._is_due(at.step):
            self._report(result.logs, at)

    def report_rest(self, logs: Logs, at: Progress) -> None:
        """Report the steps that were not reported yet, if there are any."""
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
    """Return the values that are single numbers, as floats that JSON can represent."""
    return {name: float(np.asarray(value).item()) for name, value in logs.items() if np.size(value) == 1}
