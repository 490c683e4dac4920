"""The state of a run, computed from its events."""

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
    NumbersChecked,
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
        hosts: the host on which each task was last started.
        up: tasks that have reported since their last start.
        has_data: whether the chief has read its data.
        training: the start of training, if it has begun.
        step: number of steps since the run began.
        epochs_done: number of complete epochs at that step.
        step_in_epoch: number of steps since the last complete epoch.
        logs: the newest losses and metrics.
        restarts: how many times each task was restarted while the others continued.
        timed: the newest step times of each task.
        stopped_after_failure: True if the job was stopped after the attempt had failed. `ended` is then the event of
            the stop, not of the failure.
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
                # the launcher's event may be behind the last report of the task
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
    """The facts about a run so far, with all of its attempts.

    Attributes:
        now: the attempt of the newest event.
        epochs: epochs in the order of their ends, without those that a resume from an earlier step has discarded.
        evaluations: results of `distlaunch evaluate`.
        sidecar: the newest result of the evaluator task.
        skipped: names of the examples that were left out.
        numbers: comparisons of the steps with one device, for the last `subject` that was compared.
        exports: the path of the last export in each format.
        export_failure: why the last export failed; empty if none failed, or if a later one succeeded.
        ended: the newest end of any attempt.
        finished: True if the run reached its planned end and no later attempt has started training.
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
    numbers: list[NumbersChecked] = field(default_factory=list)
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
                self.epochs = kept_epochs([*self.epochs, event])
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
            case NumbersChecked():
                # with another subject, earlier comparisons say nothing about the numbers of this attempt
                known = self.numbers if self.numbers and self.numbers[0].subject == event.subject else []
                self.numbers = [*known, event]
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
        """Return the last start of training, or None.

        For a finished run, later attempts are ignored, because they did not train.
        """
        last = self.ended.attempt if self.ended and self.finished else max(self.attempts, default=0)
        starts = (self.attempts[number].training for number in sorted(self.attempts, reverse=True) if number <= last)
        return next((start for start in starts if start is not None), None)

    def last_trained(self, most: int | None = None) -> AttemptFacts:
        """Return the last attempt that has begun to train; without one, facts about an attempt that has done nothing.

        Args:
            most: the largest number of an attempt to look at; None for any.
        """
        numbers = [number for number in sorted(self.attempts, reverse=True) if most is None or number <= most]
        attempts = (self.attempts[number] for number in numbers)
        return next((each for each in attempts if each.training is not None or each.step), AttemptFacts())

    @property
    def restarts(self) -> Counter[str]:
        """Return the number of restarts of each task while the others continued."""
        return sum((attempt.restarts for attempt in self.attempts.values()), Counter[str]())


def kept_epochs(events: Iterable[Event]) -> list[EpochEnded]:
    """Return the epochs that a run has trained, without those that a resume from an earlier step has discarded.

    Args:
        events: events in their order, with all starts of training.
    """
    epochs: list[EpochEnded] = []
    for event in events:
        if isinstance(event, EpochEnded):
            epochs.append(event)
        elif isinstance(event, TrainingStarted):
            # tasks report the same start, some of them late
            epochs = [each for each in epochs if each.step <= event.first_step or each.attempt == event.attempt]
    return epochs
