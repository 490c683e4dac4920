"""Policies that decide when to save a checkpoint, one for each reason, and their composition.

The training loop asks a `SaveDecision` whenever it may save: after a call of the program, at the end of an epoch, after
a stop request, and at the end of training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from distlaunch.base.events import Event
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.config.run import Checkpoint

PRIOR_S = 24 * 3600.0
"""Time between two failures that is assumed as long as the run has not failed."""
FIRST_S = 60.0
"""Time until the first checkpoint, before the cost of a checkpoint is known."""


class Moment(Enum):
    """Position of the training loop when it asks a policy."""

    STEP = "after a step, within an epoch"
    EPOCH_END = "after an epoch and its validation"
    STOP = "training stops early, to be resumed: after a signal (Ctrl-C, preemption), or after an error in the config"
    END = "training has ended"


@dataclass(frozen=True)
class SaveContext:
    """Facts on which a policy bases its decision.

    Attributes:
        moment: position of the training loop.
        step: number of global batches since the run began.
        now_s: time on the process's clock.
        epoch: number of finished epochs, at the end of an epoch.
        is_last: whether training ends with this epoch.
        logs: values of the epoch, including validation, at its end.
        is_validated: whether the epoch was followed by validation.
        chief_asks: result of the chief's `SaveDecision.chief_asks`, which all tasks receive with the result of their
            vote.
    """

    moment: Moment
    step: int = 0
    now_s: float = 0.0
    epoch: int = 0
    is_last: bool = False
    logs: Mapping[str, float] = field(default_factory=dict)
    is_validated: bool = False
    chief_asks: bool = False


class SavePolicy(ABC):
    """A reason to save.

    Attributes:
        asks_chief_only: whether the answer depends on facts that only the chief knows, such as its clock. Then only the
            chief is asked, and its answer is broadcast, because all tasks must save at the same step.
    """

    asks_chief_only: ClassVar[bool] = False

    @abstractmethod
    def should_save(self, at: SaveContext) -> bool:
        """Return whether to save a checkpoint now. This has no side effects and may be called more than once."""

    def steps_until_due(self, step: int) -> int | None:
        """Return how many steps after `step` this policy must be asked at the latest; None for no limit."""
        return None

    def saved(self, now_s: float) -> None:  # noqa: B027 (few need it)
        """Record that a checkpoint was taken, whatever the reason."""

    def learn(self, stalled_s: float, writing_s: float) -> None:  # noqa: B027 (few need it)
        """Record the cost of the last checkpoint. May be called in any thread.

        Args:
            stalled_s: seconds for which training was stopped.
            writing_s: seconds for writing the checkpoint.
        """


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Saves after each multiple of `steps`."""

    steps: int

    def should_save(self, at: SaveContext) -> bool:
        return at.moment is Moment.STEP and at.step % self.steps == 0

    def steps_until_due(self, step: int) -> int | None:
        return self.steps - step % self.steps


@dataclass(frozen=True)
class EveryEpochs(SavePolicy):
    """Saves after every `epochs`-th epoch, except the last one, after which `AtEnd` saves."""

    epochs: int

    def should_save(self, at: SaveContext) -> bool:
        return at.moment is Moment.EPOCH_END and not at.is_last and at.epoch % self.epochs == 0


class OnStop(SavePolicy):
    """Saves when training stops before its end."""

    def should_save(self, at: SaveContext) -> bool:
        return at.moment is Moment.STOP


class AtEnd(SavePolicy):
    """Saves when training has ended."""

    def should_save(self, at: SaveContext) -> bool:
        return at.moment is Moment.END


class EverySeconds(SavePolicy):
    """Saves when an interval has passed since the last checkpoint.

    Args:
        seconds: the interval.
        now_s: time at which training begins, on any clock.
    """

    asks_chief_only = True

    def __init__(self, seconds: float, now_s: float) -> None:
        self._seconds, self._last_s = seconds, now_s

    def interval_s(self, now_s: float) -> float:
        """Return the time from the last checkpoint to the next."""
        return self._seconds

    def should_save(self, at: SaveContext) -> bool:
        return at.moment is Moment.STEP and at.now_s - self._last_s >= self.interval_s(at.now_s)

    def saved(self, now_s: float) -> None:
        self._last_s = now_s


class CheapestInterval(EverySeconds):
    """Saves at the interval that loses the least time, given the run's failures and the cost of a checkpoint.

    Args:
        failures: failures of earlier attempts.
        now_s: time at which training begins.
    """

    def __init__(self, failures: Failures, now_s: float) -> None:
        super().__init__(FIRST_S, now_s)
        self._failures, self._began_s = failures, now_s
        self._cost: tuple[float, float] | None = None

    def interval_s(self, now_s: float) -> float:
        if self._cost is None:
            return super().interval_s(now_s)
        return cheapest_interval_s(self._failures.mean_s_between(now_s - self._began_s), *self._cost)

    def learn(self, stalled_s: float, writing_s: float) -> None:
        self._cost = stalled_s, writing_s


@dataclass(frozen=True)
class AnyOf(SavePolicy):
    """Saves if one of several policies does."""

    policies: Sequence[SavePolicy]

    def should_save(self, at: SaveContext) -> bool:
        return any(policy.should_save(at) for policy in self.policies)

    def steps_until_due(self, step: int) -> int | None:
        found = [policy.steps_until_due(step) for policy in self.policies]
        return min((steps for steps in found if steps is not None), default=None)

    def saved(self, now_s: float) -> None:
        for policy in self.policies:
            policy.saved(now_s)

    def learn(self, stalled_s: float, writing_s: float) -> None:
        for policy in self.policies:
            policy.learn(stalled_s, writing_s)


class SaveDecision(AnyOf):
    """Makes the same decision in all tasks, by several policies.

    The chief votes with the result of `chief_asks`. After the vote, each task calls `should_save` with that result in
    `SaveContext.chief_asks`.
    """

    def chief_asks(self, at: SaveContext) -> bool:
        """Return whether a policy that only the chief can ask wants to save. Only the chief calls this."""
        return any(policy.should_save(at) for policy in self.policies if policy.asks_chief_only)

    def should_save(self, at: SaveContext) -> bool:
        return at.chief_asks or any(policy.should_save(at) for policy in self.policies if not policy.asks_chief_only)


def save_decision(
    section: Checkpoint, failures: Failures, now_s: float, others: Iterable[SavePolicy] = ()
) -> SaveDecision:
    """Return the decision that a config asks for.

    Args:
        failures: failures of earlier attempts.
        now_s: time at which training begins.
        others: further policies.
    """
    policies: list[SavePolicy] = [OnStop(), AtEnd(), *others]
    if section.every_steps is not None:
        policies.append(EverySteps(section.every_steps))
    if section.every_epochs is not None:
        policies.append(EveryEpochs(section.every_epochs))
    if section.every_minutes is not None:
        policies.append(EverySeconds(60 * section.every_minutes, now_s))
    if section.every == "auto":
        policies.append(CheapestInterval(failures, now_s))
    return SaveDecision(policies)


@dataclass(frozen=True)
class Failures:
    """Number of failures of a run, and its seconds of training."""

    number: int = 0
    trained_s: float = 0.0

    def mean_s_between(self, trained_s: float) -> float:
        """Return the mean time between two failures.

        Args:
            trained_s: seconds that this attempt has trained without a failure.
        """
        # the estimate includes the current attempt, so it grows as long as there is no failure
        return (self.trained_s + trained_s) / self.number if self.number else PRIOR_S


def past_failures(events: Iterable[Event]) -> Failures:
    """Return the failures of those attempts that have trained; an attempt without an end event was killed."""
    trained = [attempt for attempt in RunFacts.of(events).attempts.values() if attempt.training is not None]
    failed = [attempt for attempt in trained if attempt.ended is None or attempt.ended.status == "failed"]
    # an attempt lasts until its last event, because a killed task does not report its end
    return Failures(len(failed), sum(each.last_at - each.training.time for each in trained if each.training))


def cheapest_interval_s(between_failures_s: float, stalled_s: float, writing_s: float) -> float:
    """Return the interval that loses the least time (Young's formula).

    If checkpoints are rare, failures lose steps. If they are frequent, saving them takes training time.

    Args:
        between_failures_s: mean time between failures.
        stalled_s: seconds for which a checkpoint stops training.
        writing_s: seconds for writing a checkpoint. The interval is never shorter, because the next checkpoint would
            have to wait.
    """
    return max(math.sqrt(2 * between_failures_s * stalled_s), writing_s)
