"""The state of a run, computed from its events: the one place that knows what each event changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from distlaunch.base.events import (
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Evaluated,
    Event,
    ExampleSkipped,
    Exported,
    ExportFailed,
    Logs,
    Predicted,
    Restored,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
    TrainingStarted,
    VariablesPlaced,
)


@dataclass
class AttemptFacts:
    """Facts about an attempt so far.

    Attributes:
        hosts: where each task was started last.
        up: tasks that have reported since they were started last.
        has_data: whether the chief has read its data.
        step: global batches since the run began; the same place is `step_in_epoch` steps after `epochs_done` epochs.
        logs: the newest values.
        restarts: how often each task was started again while the others went on.
        timed: how the time of each task's steps has gone.
        stopped_after_failure: somebody called the next attempt off; the last `ended` says how.
        has_result: whether it has evaluated, predicted or exported.
        last_at: the time of its newest event.
    """

    hosts: dict[str, str] = field(default_factory=dict)
    up: set[str] = field(default_factory=set)
    has_data: bool = False
    training: TrainingStarted | None = None
    step: int = 0
    epochs_done: int = 0
    step_in_epoch: int = 0
    logs: Logs = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)
    timed: dict[str, StepsTimed] = field(default_factory=dict)
    failed: TaskFailed | None = None
    ended: RunEnded | None = None
    stopped_after_failure: bool = False
    has_result: bool = False
    last_at: float = 0.0

    def add(self, event: Event) -> None:
        self.last_at = event.time
        match event:
            case TaskStarted():
                self.hosts[event.task] = event.host
                self.up.add(event.task)
            case DataResolved():
                self.has_data = True
            case TaskRestarted():
                self.restarts[event.restarted_task] += 1
                self.up.discard(event.restarted_task)
            case Restored():
                self._reach(event.step, event.epoch)
            case TrainingStarted():
                self.training = event
                self._reach(event.first_step, event.first_epoch)
            case StepsDone():
                self._reach(event.step, event.epoch, event.step_in_epoch, event.logs)
            case StepsTimed():
                self.timed[event.task] = event
            case EpochEnded():
                self._reach(event.step, event.epoch + 1, 0, event.logs)
            case TaskFailed():
                self.failed, self.stopped_after_failure = event, False
            case RunEnded():
                self.ended = event
                self.stopped_after_failure = self.failed is not None and event.status in ("stopped", "interrupted")
                # the launcher may know less than the task has reported
                self.step, self.epochs_done = max(self.step, event.step), max(self.epochs_done, event.epochs_done)
                self.logs = event.logs or self.logs
            case Evaluated() | Predicted() | Exported():
                self.has_result = True
            case _:
                pass

    def _reach(self, step: int, epochs_done: int, step_in_epoch: int = 0, logs: Logs | None = None) -> None:
        self.step, self.epochs_done, self.step_in_epoch = step, epochs_done, step_in_epoch
        self.logs = logs or self.logs


@dataclass
class RunFacts:
    """A run so far, all its attempts.

    Attributes:
        now: the attempt of the newest event.
        epochs: in the order in which they ended; what was done twice is there twice, as in `checkpoints`.
        evaluations: the run's own; `sidecar` is the newest of the evaluator beside training.
        skipped: examples that were left out, by any task that has reported it here.
        exports: where each format was written last.
        export_failure: why the last export failed; empty if none did, or another has been written since.
        ended: the newest end of any attempt.
        finished: the run came to its planned end, and no later attempt has taken it on from there, be it without a
            word.
    """

    attempts: dict[int, AttemptFacts] = field(default_factory=dict)
    now: AttemptFacts = field(default_factory=AttemptFacts)
    data: DataResolved | None = None
    restored: Restored | None = None
    placed: VariablesPlaced | None = None
    epochs: list[EpochEnded] = field(default_factory=list)
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    sidecar: Evaluated | None = None
    skipped: set[str] = field(default_factory=set)
    exports: dict[str, str] = field(default_factory=dict)
    export_failure: str = ""
    ended: RunEnded | None = None
    finished: bool = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        facts = cls()
        for event in events:
            facts.add(event)
        return facts

    def add(self, event: Event) -> None:
        self.now = self.attempts.setdefault(event.attempt, AttemptFacts())
        self.now.add(event)
        match event:
            case DataResolved():
                self.data = event
            case Restored():
                self.restored = event
            case VariablesPlaced():
                self.placed = event
            case TrainingStarted():
                self.finished = False
            case EpochEnded():
                self.epochs.append(event)
            case CheckpointSaved():
                self.checkpoints.append(event)
            case Evaluated() if event.of_evaluator:
                self.sidecar = event
            case Evaluated():
                self.evaluations.append(event)
            case ExampleSkipped():
                self.skipped.add(event.example)
            case Exported():
                self.exports[event.format], self.export_failure = event.path, ""
            case ExportFailed():
                self.export_failure = event.reason
            case RunEnded():
                self.ended, self.finished = event, event.status == "done"
            case _:
                pass

    @property
    def start(self) -> TrainingStarted | None:
        """Return the last start of training, ignoring attempts on a finished run that changed nothing."""
        last = self.ended.attempt if self.ended and self.finished else max(self.attempts, default=0)
        starts = (self.attempts[number].training for number in sorted(self.attempts, reverse=True) if number <= last)
        return next((start for start in starts if start is not None), None)

    @property
    def restarts(self) -> Counter[str]:
        """Return the number of restarts of each task while the others continued."""
        return sum((attempt.restarts for attempt in self.attempts.values()), Counter[str]())
