"""Computes goodput: the share of a run's wall time that went into productive steps, and where the rest went.

The categories are those of Google's ml-goodput-measurement library, under names for users. A run directory records no
hardware counters, so everything is computed from the events of the chief and the launcher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distlaunch.base.event_files import read_times
from distlaunch.base.events import (
    AttemptStarted,
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Event,
    Exported,
    ExportFailed,
    Restored,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskFailed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.bottleneck import waited_fraction

STEPS = "steps"
"""The category of productive time."""
CATEGORIES = {
    STEPS: "GOODPUT",
    "hosts": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "start": "TPU_INITIALIZATION",
    "build": "TRAINING_PREP",
    "compile": "PROGRAM_STARTUP",
    "restore": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "data": "DATA_LOADING_SYNC",
    "validation": "CUSTOM_BADPUT_EVENTS",
    "save": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "export": "CUSTOM_BADPUT_EVENTS",
    "lost": "WASTED_PROGRESS_FROM_DISRUPTION",
    "pauses": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "other": "OTHER",
}
"""The categories of time, each with its name in ml-goodput-measurement."""
_AVOIDABLE = ("hosts", "compile", "restore", "data", "save", "lost")
_NOTABLE_SHARE, _NOTABLE_S = 0.1, 10.0
"""Smallest share of the wall time, and smallest number of seconds, of a loss that the summary of a run reports."""


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run by category: from the wait for the first hosts to the last event.

    Attributes:
        seconds: seconds in each of `CATEGORIES`. They add up to the wall time.
    """

    seconds: dict[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Return the share of the wall time in productive steps, from 0 to 1."""
        return self.seconds[STEPS] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def losses(self) -> dict[str, float]:
        """Return the share of the wall time in each other category, the largest first."""
        wall_s = self.wall_s
        shares = {name: value / wall_s for name, value in self.seconds.items() if name != STEPS and wall_s > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def notable_losses(self) -> dict[str, float]:
        """Return the avoidable losses that are worth a line at the end of a run, in the form of `losses`."""
        return {
            name: share
            for name, share in self.losses.items()
            if name in _AVOIDABLE and share >= _NOTABLE_SHARE and self.seconds[name] >= _NOTABLE_S
        }

    def to_plain(self) -> dict[str, Any]:
        return {"share": self.share, "wall_s": self.wall_s, "seconds": self.seconds}


def run_goodput(run: RunDir) -> Goodput | None:
    """Return where the wall time of a run went; None if training has not started."""
    return goodput_of(read_times(run.events))


def goodput_of(events: Iterable[Event]) -> Goodput | None:
    """Return where the wall time of a run went; None if training has not started.

    Args:
        events: events of the chief and the launcher, in the order of the run's event file.
    """
    attempts = _attempts(events)
    if not any(attempt.first_step is not None for attempt in attempts):
        return None
    timed = [attempt.timed for attempt in attempts]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for number, attempt in enumerate(attempts):
        later = [each.first_step for each in attempts[number + 1 :] if each.first_step is not None]
        # if an attempt was killed before it reported times, use those of the nearest attempt that has reported times
        known = next((each for each in (*timed[number::-1], *timed[number + 1 :]) if each is not None), None)
        for name, value in attempt.by_category(min(later, default=None), known).items():
            seconds[name] += value
    return Goodput(seconds)


def paused_s(events: Iterable[Event]) -> float:
    """Return the seconds between the attempts of a run, in which none of them was running."""
    return sum(attempt.paused_s for attempt in _attempts(events))


@dataclass
class _Report:
    """Steps that were reported together: `step` is the last one, `seconds` the time of these `steps`."""

    step: int
    steps: int
    seconds: float


@dataclass
class _Attempt:
    """The time of one attempt, as its events come in.

    Attributes:
        paused_s: time since the last event of the previous attempt, without `waited_s`.
        waited_s: time for which the launcher waited for hosts.
        phase: the category of time before the first step: `start` or `build`.
        first_step: the step from which training continues; None before that is known.
        pending_s: time since the last steps or the last epoch, whose category is not known yet.
        between_s: time between steps, which may include saving checkpoints.
    """

    paused_s: float
    waited_s: float
    phase: str
    first_step: int | None = None
    restored: bool = False
    start_s: float = 0.0
    build_s: float = 0.0
    restore_s: float = 0.0
    pending_s: float = 0.0
    between_s: float = 0.0
    validation_s: float = 0.0
    export_s: float = 0.0
    lost_s: float = 0.0
    stalled_s: float = 0.0
    timed: StepsTimed | None = None
    reports: list[_Report] = field(default_factory=list)

    def add(self, event: Event, elapsed_s: float) -> None:
        """Add an event, and the time since the previous one."""
        self.pending_s += elapsed_s
        match event:
            case TaskStarted() | DataResolved():
                self._prepared()
                self.phase = "build"
            case Restored():
                reading_s = min(_duration(event.seconds), self.pending_s) if self.first_step is None else 0.0
                self.restore_s += reading_s
                self.pending_s -= reading_s
                self.restored = True
                self._prepared()
            case TrainingStarted():
                self._prepared()
                self.first_step = event.first_step
            case StepsDone():
                steps_s = min(_duration(event.seconds), self.pending_s)
                if self.reports:
                    self.between_s += self.pending_s - steps_s
                elif self.restored:  # the checkpoint's values are set before the first step
                    self.restore_s += self.pending_s - steps_s
                else:
                    self.build_s += self.pending_s - steps_s
                self.pending_s = 0.0
                self.reports.append(_Report(event.step, max(event.steps, 0), steps_s))
            case EpochEnded():
                self.validation_s += self.pending_s
                self.pending_s = 0.0
            case StepsTimed():
                self.timed = event
            case CheckpointSaved():
                self.stalled_s += _duration(event.stalled_s)
            case Exported() | ExportFailed() if self.first_step is not None:
                self.export_s += elapsed_s
                self.pending_s -= elapsed_s
            case TaskFailed() if self.first_step is not None:
                # the task made steps that it has not reported, or it hung
                self.lost_s += self.pending_s
                self.pending_s = 0.0
            case _:
                pass

    def _prepared(self) -> None:
        """Count the pending time as preparation, unless training has started."""
        if self.first_step is None:
            if self.phase == "start":
                self.start_s += self.pending_s
            else:
                self.build_s += self.pending_s
            self.pending_s = 0.0

    def by_category(self, continued_at: int | None, timed: StepsTimed | None) -> dict[str, float]:
        """Return the seconds in each category, which add up to the time of the attempt and the pause before it.

        Args:
            continued_at: the step from which a later attempt continued; None if there is no later attempt.
            timed: the times that show how long steps wait for input; None if unknown.
        """
        self._prepared()
        between_s, validation_s, rest_s = self.between_s, self.validation_s, self.pending_s
        save_s = min(self.stalled_s, between_s + rest_s + validation_s)
        # checkpoints are usually taken between steps, or after the last one
        between_save_s = min(save_s, between_s)
        rest_save_s = min(save_s - between_save_s, rest_s)
        between_s, rest_s = between_s - between_save_s, rest_s - rest_save_s
        validation_s -= save_s - between_save_s - rest_save_s
        compile_s, kept_s, lost_s = self._steps(continued_at)
        waited = (waited_fraction(timed) or 0.0) if timed is not None else 0.0
        data_s = kept_s * min(max(waited, 0.0), 1.0)
        return {
            STEPS: kept_s - data_s,
            "hosts": self.waited_s,
            "start": self.start_s,
            "build": self.build_s,
            "compile": compile_s,
            "restore": self.restore_s,
            "data": data_s,
            "validation": validation_s,
            "save": save_s,
            "export": self.export_s,
            "lost": self.lost_s + lost_s,
            "pauses": self.paused_s,
            "other": between_s + rest_s,
        }

    def _steps(self, continued_at: int | None) -> tuple[float, float, float]:
        """Return the seconds of compiling, of steps that count, and of steps that were trained again later."""
        compile_s = self._compile_s()
        kept_s = lost_s = 0.0
        for number, report in enumerate(self.reports):
            seconds = report.seconds - (compile_s if number == 0 else 0.0)
            again = 0 if continued_at is None else min(max(report.step - continued_at, 0), report.steps)
            part = seconds * again / report.steps if report.steps else 0.0
            lost_s += part
            kept_s += seconds - part
        return compile_s, kept_s, lost_s

    def _compile_s(self) -> float:
        """Return the time of the first report beyond the usual time of its steps."""
        if not self.reports:
            return 0.0
        first, *others = self.reports
        usual = (self.timed.seconds, self.timed.steps) if self.timed is not None and self.timed.steps else None
        if usual is None:
            usual = sum(each.seconds for each in others), sum(each.steps for each in others)
        seconds, steps = usual
        if steps <= 0:
            return 0.0
        return max(0.0, first.seconds - first.steps * _duration(seconds) / steps)


def _duration(seconds: float | None) -> float:
    """Return a duration from an event, or 0.0 if it is missing, negative or not finite."""
    return seconds if seconds is not None and 0 < seconds < math.inf else 0.0


def _attempts(events: Iterable[Event]) -> Sequence[_Attempt]:
    """Return the attempts of a run with their times."""
    found: list[_Attempt] = []
    number, last_at = -1, 0.0
    for event in events:
        if not math.isfinite(event.time):
            continue
        # no time may become negative because a clock was set back, or because an event has another host's clock
        at = max(event.time, last_at) if found else event.time
        if found and event.attempt <= number:
            found[-1].add(event, at - last_at)
        else:
            found.append(_begin(event, at - last_at if found else None))
            number = event.attempt
        last_at = at
    return found


def _begin(event: Event, since_last_s: float | None) -> _Attempt:
    """Return the attempt that begins with an event.

    Args:
        since_last_s: time since the last event of the previous attempt; None for the first attempt.
    """
    waited_s, ran_s = 0.0, 0.0
    if isinstance(event, AttemptStarted):
        waited_s = _duration(event.waited_s)
    elif isinstance(event, RunEnded):  # a script's attempt, of which the launcher reports only the end
        ran_s = _duration(event.seconds)
    if since_last_s is not None:
        waited_s = min(waited_s, since_last_s)
        ran_s = min(ran_s, since_last_s - waited_s)
    paused_s = 0.0 if since_last_s is None else since_last_s - waited_s - ran_s
    attempt = _Attempt(paused_s, waited_s, "start" if isinstance(event, AttemptStarted) else "build", pending_s=ran_s)
    attempt.add(event, 0.0)
    return attempt
