"""Policies that decide when to save a checkpoint, one for each reason, and their composition.

The training loop asks a `SaveDecision` at each moment at which it may save: after a call of the program, at the end of
an epoch, when it was asked to stop, and at the end of training.
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
"""Time until the first checkpoint, as long as nobody knows what one costs."""


class Moment(Enum):
    """The position of the training loop when it asks."""

    STEP = "after a step, within an epoch"
    EPOCH_END = "after an epoch and its validation"
    STOP = "training stops before its end, to be resumed: a signal came (Ctrl-C, preemption), or a mistake was found"
    END = "training has ended"


@dataclass(frozen=True)
class SaveContext:
    """The facts on which a policy decides.

    Attributes:
        step: global batches done since the run began.
        now_s: time of the process's clock.
        epoch: at the end of an epoch: the number of finished epochs.
        is_last: whether training ends with this epoch.
        logs: at the end of an epoch: its values, those of validation included.
        is_validated: whether there was validation after the epoch.
        chief_asks: the chief's answer from `SaveDecision.chief_asks`, which has reached all tasks with their votes.
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
        asks_chief_only: True if the answer depends on what the chief alone knows, such as its clock. All tasks have to
            save at the same step, so the chief alone is asked, and its answer is broadcast.
    """

    asks_chief_only: ClassVar[bool] = False

    @abstractmethod
    def should_save(self, at: SaveContext) -> bool:
        """Return True if a checkpoint is to be saved now. Changes nothing: it may be asked more than once."""

    def steps_until_due(self, step: int) -> int | None:
        """Return how many steps may run from `step` before this policy has to be asked; None: any number."""
        return None

    def saved(self, now_s: float) -> None:  # noqa: B027 (few need it)
        """Record that a checkpoint was taken, for any reason."""

    def learn(self, stalled_s: float, writing_s: float) -> None:  # noqa: B027 (few need it)
        """Record the cost of the last checkpoint. May be called in any thread.

        Args:
            stalled_s: seconds for which training stood still.
            writing_s: seconds that writing took.
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
    """Saves after every `epochs`-th epoch; after the last one, the end of training does."""

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
    """Saves when so much time has passed since the last checkpoint.

    Args:
        seconds: the interval.
        now_s: when training begins; seconds of any clock.
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
    """Saves at the interval that loses least, from how often the run fails and what a checkpoint costs.

    Args:
        failures: those of earlier attempts.
        now_s: when training begins.
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
    """Decides for all tasks alike, by several policies.

    The chief's answer from `chief_asks` goes into its vote. After the vote each task calls `should_save` with that
    answer (`SaveContext.chief_asks`).
    """

    def chief_asks(self, at: SaveContext) -> bool:
        """Return whether a policy that the chief alone can answer wants to save. To be called by the chief."""
        return any(policy.should_save(at) for policy in self.policies if policy.asks_chief_only)

    def should_save(self, at: SaveContext) -> bool:
        return at.chief_asks or any(policy.should_save(at) for policy in self.policies if not policy.asks_chief_only)


def save_decision(
    section: Checkpoint, failures: Failures, now_s: float, others: Iterable[SavePolicy] = ()
) -> SaveDecision:
    """Return the decision that a config asks for.

    Args:
        failures: those of earlier attempts.
        now_s: when training begins.
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
    """The number of failures of a run, and its seconds of training."""

    number: int = 0
    trained_s: float = 0.0

    def mean_s_between(self, trained_s: float) -> float:
        """Return the mean time between two failures.

        Args:
            trained_s: how long this attempt has trained by now, without a failure.
        """
        # the time without a failure counts: the estimate grows while nothing happens
        return (self.trained_s + trained_s) / self.number if self.number else PRIOR_S


def past_failures(events: Iterable[Event]) -> Failures:
    """Return the failures of a run's attempts that trained; one without an event at its end was killed."""
    trained = [attempt for attempt in RunFacts.of(events).attempts.values() if attempt.training is not None]
    failed = [attempt for attempt in trained if attempt.ended is None or attempt.ended.status == "failed"]
    # until its newest event, whatever that is: a killed task reports no end
    return Failures(len(failed), sum(each.last_at - each.training.time for each in trained if each.training))


def cheapest_interval_s(between_failures_s: float, stalled_s: float, writing_s: float) -> float:
    """Return the interval that loses least (Young's formula).

    Rare checkpoints lose steps at a failure, frequent ones training time.

    Args:
        between_failures_s: mean time between failures.
        stalled_s: how long training stands still for a checkpoint.
        writing_s: how long one is written: within that time, the next would make training wait.
    """
    return max(math.sqrt(2 * between_failures_s * stalled_s), writing_s)
