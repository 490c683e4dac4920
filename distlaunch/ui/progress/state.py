"""The state of a running job that its views show: the facts from its events, and its speed."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from distlaunch.base.events import EpochEnded, Evaluated, Event, Logs, StepsDone, TrainingStarted
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts

_NUM_RECENT_REPORTS = 9
"""Number of reports whose median is the speed. The median ignores the few slow reports with a compilation."""
_MIN_REPORTS = 3
"""Smallest number of reports for which the speed is shown, even if each of them may include a compilation."""


@dataclass
class ProgressState(RunFacts):
    """The facts of a run that this launcher has seen.

    Attributes:
        tasks: the tasks that this launcher has started.
        job_restarts: how many times the job was restarted.
        steps_per_s: the speed, if known.
    """

    tasks: tuple[str, ...] = ()
    job_restarts: int = 0
    steps_per_s: float | None = None
    _reported_at: float | None = None  # when the last steps of this epoch were reported
    _compiled_sizes: set[int] = field(default_factory=set)
    """Numbers of steps per call in this attempt. A call with another number of steps has to compile."""
    _recent_speeds: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_REPORTS))
    """Steps per second of each report except the first, and whether the call was already compiled."""

    def begin_attempt(self, tasks: tuple[str, ...]) -> None:
        """Reset the facts of the attempt's processes, but keep those of the run."""
        self.job_restarts += self.now.failed is not None
        self.tasks, self.now = tasks, AttemptFacts()
        self._forget_speed()

    def add(self, event: Event) -> None:
        super().add(event)
        match event:
            case TrainingStarted():
                self._forget_speed()
            case StepsDone():
                self._update_speed(event)
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
        """Return what training waits for.

        Args:
            framework: the text to return if the only task has not reported yet.
        """
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

    def _update_speed(self, event: StepsDone) -> None:
        # include the time of callbacks between calls, but not of validation and checkpoints at the end of an epoch
        seconds = event.seconds if self._reported_at is None else max(event.seconds, event.time - self._reported_at)
        self._reported_at = event.time
        if self._compiled_sizes and seconds > 0:
            self._recent_speeds.append((event.steps / seconds, event.steps in self._compiled_sizes))
            speeds = [speed for speed, is_compiled in self._recent_speeds if is_compiled]
            if not speeds and len(self._recent_speeds) >= _MIN_REPORTS:
                speeds = [speed for speed, _ in self._recent_speeds]
            self.steps_per_s = statistics.median(speeds) if speeds else None
        self._compiled_sizes.add(event.steps)

    def _forget_speed(self) -> None:
        self._reported_at, self.steps_per_s = None, None
        self._compiled_sizes.clear()
        self._recent_speeds.clear()
