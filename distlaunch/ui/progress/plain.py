"""Progress where there is no terminal: whole lines, no control codes, one an epoch and a few between."""

from __future__ import annotations

from rich.console import Console

from distlaunch.base.events import Event, StepsDone, TrainingStarted
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.bottleneck import find_bottleneck
from distlaunch.ui import words
from distlaunch.ui.progress.lines import event_line, note_line, task_line, tells_of_stopping
from distlaunch.ui.progress.state import ProgressState

EVERY_S = 10.0  # between two lines of progress


class PlainView:
    """Prints lines to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.state = ProgressState()
        self._now = 0.0
        self._printed_at: float | None = None
        self._trains = False
        self._stops = False
        self._began: float | None = None

    def started(self, plan: LaunchPlan) -> None:
        self.state.begin_attempt(tuple(str(task.task) for task in plan.tasks))
        self._printed_at, self._trains = None, plan.mode == "train"
        self._began, self._stops = None, False

    def event(self, event: Event) -> None:
        self.state.add(event)
        training = self.state.now.training
        line = event_line(event, training.epochs if training else 1)
        if line is not None:
            self._print(line)
        # any line shows that it lives: the time counts from there
        if isinstance(event, TrainingStarted) or (line is not None and self._printed_at is not None):
            self._printed_at = self._now
        if isinstance(event, StepsDone) and self._printed_at is not None and self._now >= self._printed_at + EVERY_S:
            self._printed_at = self._now
            self._print(_progress(self.state))

    def line(self, task: str, text: str) -> None:
        self._print(task_line(task, text, alone=len(self.state.tasks) == 1))

    def note(self, text: str) -> None:
        self._stops = self._stops or tells_of_stopping(text)
        self._print(note_line(text))

    def tick(self, now: float) -> None:
        self._now = now
        self._began = now if self._began is None else self._began
        waiting = self.state.now.training is None and (self._trains or bool(self.state.missing)) and not self._stops
        if self._printed_at is None:
            self._printed_at = now
        elif waiting and now >= self._printed_at + EVERY_S:
            self._printed_at = now
            what = self.state.preparing(framework=f"waiting for {', '.join(self.state.missing)}")
            self._print(f"{what} ({now - self._began:.0f} s so far)")

    def ended(self) -> None: ...

    def _print(self, text: object) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _progress(state: ProgressState) -> str:
    start = state.now.training
    of = f"/{start.steps_per_epoch:,}" if start and start.steps_per_epoch else ""
    parts = [f"epoch {state.now.epochs_done + 1}/{start.epochs if start else 1}  {state.now.step_in_epoch:,}{of} steps"]
    if state.steps_per_s:
        parts.append(words.rate(state.steps_per_s))
    if state.eta_s is not None:
        parts.append(f"eta {words.clock(state.eta_s)}")
    parts.append(words.metrics(state.logs))
    if slow := find_bottleneck(state.now.timed):
        parts.append(f"input: {slow.finding}")
    return "  ".join(parts)
