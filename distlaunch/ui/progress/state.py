"""The state behind the views of a running job: the facts of its events, and its speed."""

from __future__ import annotations

from dataclasses import dataclass

from distlaunch.base.events import EpochEnded, Evaluated, Event, Logs, StepsDone, TrainingStarted
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts

_SMOOTHING = 0.3  # weight of the newest speed; the rest is that of the ones before


@dataclass
class ProgressState(RunFacts):
    """A run as far as this launcher has seen it. `tasks` are those that it has started."""

    tasks: tuple[str, ...] = ()
    job_restarts: int = 0
    steps_per_s: float | None = None
    _reported_at: float | None = None  # when the last steps of this epoch were told
    _has_compiled: bool = False  # the first call of an attempt compiles: its time says nothing about the next

    def begin_attempt(self, tasks: tuple[str, ...]) -> None:
        """Processes start anew; what was learnt about the run stays."""
        self.job_restarts += self.now.failed is not None
        self.tasks, self.now, self.steps_per_s = tasks, AttemptFacts(), None

    def add(self, event: Event) -> None:
        super().add(event)
        match event:
            case TrainingStarted():
                self._reported_at, self._has_compiled, self.steps_per_s = None, False, None
            case StepsDone():
                self._time(event)
            case EpochEnded():
                self._reported_at = None

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
        """Tasks that have not reported yet."""
        return [task for task in self.tasks if task not in self.now.up]

    def preparing(self, *, framework: str) -> str:
        """What is waited for before training; `framework` where it is the only task."""
        if self.missing:
            return f"waiting for {', '.join(self.missing)}" if len(self.tasks) > 1 else framework
        return "building the model" if self.now.has_data else "reading the data"

    @property
    def is_past_last_epoch(self) -> bool:
        """Whether only the last checkpoint and the export are left."""
        start = self.now.training
        return start is not None and (self.now.ended is not None or self.now.epochs_done >= start.epochs)

    @property
    def eta_s(self) -> float | None:
        """Seconds of training that are left in the run; None if not known."""
        start = self.now.training
        if start is None or start.steps_per_epoch is None or not self.steps_per_s:
            return None
        left = (start.epochs - self.now.epochs_done) * start.steps_per_epoch - self.now.step_in_epoch
        return max(0, left) / self.steps_per_s

    def _time(self, event: StepsDone) -> None:
        # what callbacks take between the calls counts, validation and checkpoints at the end of an epoch do not
        seconds = event.seconds if self._reported_at is None else max(event.seconds, event.time - self._reported_at)
        self._reported_at = event.time
        if not self._has_compiled:
            self._has_compiled = True
        elif seconds > 0:
            now = event.steps / seconds
            before = self.steps_per_s
            self.steps_per_s = now if before is None else before + _SMOOTHING * (now - before)
