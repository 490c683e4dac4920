"""The state behind the views of a running job: the facts of its events, and its speed."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from distlaunch.base.events import EpochEnded, Evaluated, Event, Logs, StepsDone, TrainingStarted
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts

_RECENT = 9
"""Number of reports whose median is the speed: one with a call that compiles is far slower, and rare."""
_ENOUGH = 3
"""Number of reports that are enough even if each has a different number of steps and may have compiled."""


@dataclass
class ProgressState(RunFacts):
    """A run as far as this launcher has seen it. `tasks` are those that it has started."""

    tasks: tuple[str, ...] = ()
    job_restarts: int = 0
    steps_per_s: float | None = None
    _reported_at: float | None = None  # when the last steps of this epoch were reported
    _seen: set[int] = field(default_factory=set)
    """Numbers of steps that were reported at once in this attempt; calls of another number compile."""
    _recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Steps a second of each report but the first, and whether its number of steps had been seen."""

    def begin_attempt(self, tasks: tuple[str, ...]) -> None:
        """Reset the state of processes; what is known about the run stays."""
        self.job_restarts += self.now.failed is not None
        self.tasks, self.now = tasks, AttemptFacts()
        self._forget_speed()

    def add(self, event: Event) -> None:
        super().add(event)
        match event:
            case TrainingStarted():
                self._forget_speed()
            case StepsDone():
                self._time(event)
            case EpochEnded():
                self._reported_at = None
            case _:
                pass

    @property
    def step(self) -> int:
        return self.now.step

    @property
    def logs(self) -> Logs:
        return self.now.logs

    @property
    def evaluated(self) -> Evaluated | None:
        return self.evaluations[-1] if self.evaluations else None

    @property
    def missing(self) -> list[str]:
        """Return the tasks that have not reported yet."""
        return [task for task in self.tasks if task not in self.now.up]

    def preparing(self, *, framework: str) -> str:
        """Return what training waits for; `framework` if this is the only task."""
        if self.missing:
            return f"waiting for {', '.join(self.missing)}" if len(self.tasks) > 1 else framework
        return "building the model" if self.now.has_data else "reading the data"

    @property
    def is_past_last_epoch(self) -> bool:
        """Return True if only the last checkpoint and the export are left."""
        start = self.now.training
        return start is not None and (self.now.ended is not None or self.now.epochs_done >= start.epochs)

    @property
    def eta_s(self) -> float | None:
        """Return the remaining seconds of training, or None if unknown."""
        start = self.now.training
        if start is None or start.steps_per_epoch is None or not self.steps_per_s:
            return None
        left = (start.epochs - self.now.epochs_done) * start.steps_per_epoch - self.now.step_in_epoch
        return max(0, left) / self.steps_per_s

    def _time(self, event: StepsDone) -> None:
        # what callbacks take between the calls counts, validation and checkpoints at the end of an epoch do not
        seconds = event.seconds if self._reported_at is None else max(event.seconds, event.time - self._reported_at)
        self._reported_at = event.time
        if self._seen and seconds > 0:
            self._recent.append((event.steps / seconds, event.steps in self._seen))
            known = [speed for speed, is_known in self._recent if is_known]
            if not known and len(self._recent) >= _ENOUGH:
                known = [speed for speed, _ in self._recent]
            self.steps_per_s = statistics.median(known) if known else None
        self._seen.add(event.steps)

    def _forget_speed(self) -> None:
        self._reported_at, self.steps_per_s = None, None
        self._seen.clear()
        self._recent.clear()
