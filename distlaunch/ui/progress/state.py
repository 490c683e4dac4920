"""What is known of a run, folded from its events. Every view draws from this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from distlaunch.base.events import (
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Evaluated,
    Event,
    Exported,
    Logs,
    Restored,
    RunEnded,
    StepsDone,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
    TrainingStarted,
)

_SMOOTHING = 0.3


@dataclass
class RunState:
    """A run so far. `tasks` are those that this launcher has started."""

    tasks: tuple[str, ...] = ()
    came: dict[str, str] = field(default_factory=dict)
    data: DataResolved | None = None
    training: TrainingStarted | None = None
    restored: Restored | None = None
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    steps_per_s: float | None = None
    logs: Logs = field(default_factory=dict)
    epoch_open: bool = False
    last_epoch: EpochEnded | None = None
    num_epochs: int = 0
    checkpoint: CheckpointSaved | None = None
    evaluated: Evaluated | None = None
    exports: dict[str, str] = field(default_factory=dict)
    ended: RunEnded | None = None
    training_s: float = 0.0
    sidecar: Evaluated | None = None
    """The newest result of the evaluator beside training; `evaluated` is the run's own."""
    restarts: Counter[str] = field(default_factory=Counter)
    """How often each task was started again while the others went on."""
    job_restarts: int = 0
    failed: TaskFailed | None = None
    _told_at: float | None = None  # when the last steps of this epoch were told
    _has_compiled: bool = False  # the first call of an attempt compiles: its time says nothing about the next

    @staticmethod
    def of(events: Iterable[Event]) -> RunState:
        state = RunState()
        for event in events:
            state.add(event)
        return state

    def begin_attempt(self, tasks: tuple[str, ...]) -> None:
        """Processes start anew; what was learnt about the run stays."""
        self.tasks, self.came, self.training, self.ended, self.steps_per_s = tasks, {}, None, None, None
        self.job_restarts += self.failed is not None
        self.failed = None

    def add(self, event: Event) -> None:
        match event:
            case TaskStarted():
                self.came[event.task] = event.host
            case DataResolved():
                self.data = event
            case TrainingStarted():
                self.training, self.step, self.epoch = event, event.first_step, event.first_epoch
                self._told_at, self._has_compiled, self.steps_per_s = None, False, None
                self.step_in_epoch, self.logs, self.epoch_open = 0, {}, True
            case StepsDone():
                self._add_steps(event)
            case EpochEnded():
                self.last_epoch, self.num_epochs = event, self.num_epochs + 1
                self.epoch, self.step, self.logs, self.epoch_open = event.epoch, event.step, event.logs, False
                self._told_at = None
                self.training_s += event.seconds
            case CheckpointSaved():
                self.checkpoint = event
            case Restored():
                self.restored = event
            case Evaluated():
                if event.of_evaluator:
                    self.sidecar = event
                else:
                    self.evaluated = event
            case TaskRestarted():
                self.restarts[event.restarted_task] += 1
                self.came.pop(event.restarted_task, None)
            case TaskFailed():
                self.failed = event
            case Exported():
                self.exports[event.format] = event.path
            case RunEnded():
                self.ended, self.step = event, max(self.step, event.step)

    @property
    def missing(self) -> list[str]:
        """Tasks that have not reported yet."""
        return [task for task in self.tasks if task not in self.came]

    @property
    def is_past_last_epoch(self) -> bool:
        """Whether only the last checkpoint and the export are left."""
        if self.training is None or self.last_epoch is None:
            return False
        return self.ended is not None or (not self.epoch_open and self.epoch + 1 >= self.training.epochs)

    @property
    def eta_s(self) -> float | None:
        """Seconds of training that are left in the run; None if not known."""
        start = self.training
        if start is None or start.steps_per_epoch is None or not self.steps_per_s:
            return None
        left = (start.epochs - self.epoch) * start.steps_per_epoch - self.step_in_epoch
        return max(0, left) / self.steps_per_s

    def _add_steps(self, event: StepsDone) -> None:
        self.epoch, self.step, self.step_in_epoch, self.logs = event.epoch, event.step, event.step_in_epoch, event.logs
        self.epoch_open = True
        # what callbacks take between the calls counts, validation and checkpoints at the end of an epoch do not
        seconds = event.seconds if self._told_at is None else max(event.seconds, event.time - self._told_at)
        self._told_at = event.time
        if not self._has_compiled:
            self._has_compiled = True
        elif seconds > 0:
            now = event.steps / seconds
            before = self.steps_per_s
            self.steps_per_s = now if before is None else before + _SMOOTHING * (now - before)
