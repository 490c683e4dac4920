"""When a checkpoint is due by the clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from distlaunch.base.events import Event
from distlaunch.base.run_files.run_facts import RunFacts

PRIOR_S = 24 * 3600.0
"""Between two failures, as long as the run has not failed."""
FIRST_S = 60.0
"""Until the first checkpoint, as long as nobody knows what one costs."""


@dataclass(frozen=True)
class Failures:
    """How often a run has failed in so many seconds of training."""

    number: int = 0
    trained_s: float = 0.0

    def mean_s_between(self, trained_s: float) -> float:
        """Seconds between two failures.

        Args:
            trained_s: what this attempt has trained by now, without a failure.
        """
        # the time without a failure counts: the estimate grows while nothing happens
        return (self.trained_s + trained_s) / self.number if self.number else PRIOR_S


def past_failures(events: Iterable[Event]) -> Failures:
    """What a run's events record of its attempts that trained; one without an event at its end was killed."""
    trained = [attempt for attempt in RunFacts.of(events).attempts.values() if attempt.training is not None]
    failed = [attempt for attempt in trained if attempt.ended is None or attempt.ended.status == "failed"]
    # until its newest event, whatever that is: a killed task reports no end
    return Failures(len(failed), sum(each.last_at - each.training.time for each in trained if each.training))


def best_interval_s(between_failures_s: float, stalled_s: float, writing_s: float) -> float:
    """The interval that loses least (Young's): rare checkpoints lose steps at a failure, frequent ones training time.

    Args:
        between_failures_s: mean time between failures.
        stalled_s: how long training stands still for a checkpoint.
        writing_s: how long one is written: within that time, the next would make training wait.
    """
    return max(math.sqrt(2 * between_failures_s * stalled_s), writing_s)


class SaveTimer:
    """Tells when a checkpoint is due, by a clock that begins anew with each one.

    Args:
        every_s: a fixed interval; None: there is none.
        auto: whether the interval that loses least counts, too.
        now: when training begins; seconds of any clock.
    """

    def __init__(self, every_s: float | None, *, auto: bool, failures: Failures, now: float) -> None:
        self._every_s, self._auto, self._failures = every_s, auto, failures
        self._began = self._last = now
        self._cost: tuple[float, float] | None = None

    def is_due(self, now: float) -> bool:
        interval_s = self.interval_s(now)
        return interval_s is not None and now - self._last >= interval_s

    def interval_s(self, now: float) -> float | None:
        """From the last checkpoint to the next; None: no clock counts."""
        intervals = [self._every_s] if self._every_s is not None else []
        if self._auto:
            mean_s = self._failures.mean_s_between(now - self._began)
            intervals.append(FIRST_S if self._cost is None else best_interval_s(mean_s, *self._cost))
        return min(intervals, default=None)

    def took(self, now: float) -> None:
        """A checkpoint was taken, for whatever reason."""
        self._last = now

    def learn(self, stalled_s: float, writing_s: float) -> None:
        """What the last one has cost."""
        self._cost = stalled_s, writing_s
