"""Views of a running job: a progress bar with lines above it for a terminal, or plain lines."""

from __future__ import annotations

import itertools

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distlaunch.base.events import Event, StepsDone, TrainingStarted
from distlaunch.base.plural import count
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.bottleneck import find_bottleneck
from distlaunch.ui import words
from distlaunch.ui.progress.lines import event_line, is_about_stopping, note_line, step_times, task_line
from distlaunch.ui.progress.state import ProgressState

REFRESH_S = 0.1
PROGRESS_INTERVAL_S = 10.0  # between two lines of progress


class LiveView:
    """Draws a progress bar on a terminal. It redraws within `tick`, without a thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.state = ProgressState()
        self._live: Live | None = None
        self._above: list[tuple[Text, bool]] = []
        self._began: float | None = None
        self._drawn_at = float("-inf")
        self._stopping = ""
        self._script = False

    def started(self, plan: LaunchPlan) -> None:
        self.state.begin_attempt(tuple(str(task.task) for task in plan.tasks))
        self._began, self._stopping, self._script = None, "", plan.mode == "run"
        live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        live.start()
        self._live = live

    def event(self, event: Event) -> None:
        self.state.add(event)
        line = event_line(event, self.state.now.training.epochs if self.state.now.training else 1)
        if line is not None:
            self._above.append((line, False))  # False: wrap the line at words

    def line(self, task: str, text: str) -> None:
        self._above.append((task_line(task, text, alone=len(self.state.tasks) == 1), True))

    def note(self, text: str) -> None:
        self._above.append((note_line(text), False))
        # between attempts there is no bar, so print the note at once
        if self._live is None:
            self._flush()
        elif is_about_stopping(text):
            self._stopping = "stopping: waiting for the tasks to end"

    def tick(self, now: float) -> None:
        self._began = now if self._began is None else self._began
        if self._live is None or now < self._drawn_at + REFRESH_S:
            return
        self._drawn_at = now
        self._flush()
        self._live.update(self._bar(now - self._began), refresh=True)

    def ended(self) -> None:
        if self._live is not None:
            # remove the bar before printing the remaining lines
            self._live.update(Text(""))
            self._flush()
            self._live.stop()
            self._live = None

    def _flush(self) -> None:
        """Print the collected lines: those of tasks unchanged, others wrapped at words."""
        above, self._above = self._above, []
        for as_is, group in itertools.groupby(above, key=lambda entry: entry[1]):
            lines = Text("\n").join([line for line, _ in group])
            self._console.print(lines, soft_wrap=as_is, highlight=False, markup=False)

    def _bar(self, elapsed_s: float) -> RenderableType:
        if self._stopping:
            return Text(f"{self._stopping} ({words.clock(elapsed_s)})", style="yellow")
        if self.state.now.training is None or self.state.is_past_last_epoch:
            return Text(self._waiting(elapsed_s), style="dim", no_wrap=True, overflow="ellipsis")
        metrics = Text(words.metrics(self.state.logs), style="dim", no_wrap=True, overflow="ellipsis")
        lines: list[RenderableType] = [progress_line(self.state)]
        if self.state.logs and self.state.now.step_in_epoch:
            lines.append(metrics)
        if self.state.now.timed:
            lines.append(Text(_times(self.state), style="dim", no_wrap=True, overflow="ellipsis"))
        if slow := find_bottleneck(self.state.now.timed):
            lines.append(Text(f"input: {slow}", style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _waiting(self, elapsed_s: float) -> str:
        clock = words.clock(elapsed_s)
        if self.state.now.training is not None:
            return f"finishing ({clock})"
        missing, num_tasks = self.state.missing, len(self.state.tasks)
        if self._script and (not missing or num_tasks == 1):
            return f"running, {count(num_tasks, 'task')} ({clock})"
        what = self.state.preparing(framework="loading the framework")
        return f"starting, {what} ({clock})" if missing else f"{what} ({clock})"


def progress_line(state: ProgressState) -> Table:
    """Return `epoch 3/10 ━━━━━╸━━━━ 234/469  84 steps/s  eta 0:45`, as wide as the terminal."""
    start = state.now.training
    assert start is not None
    epoch, done, total = state.now.epochs_done, state.now.step_in_epoch, start.steps_per_epoch
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.columns[1].ratio = 1
    head = f"epoch {min(epoch + 1, start.epochs)}/{start.epochs}"
    steps = f"{done:,}/{total:,}" if total else count(done, "step")
    speed = words.rate(state.steps_per_s) if state.steps_per_s else ""
    eta = f"eta {words.clock(state.eta_s)}" if state.eta_s is not None else ""
    bar = ProgressBar(total=total or 1, completed=done if total else 0)
    validating = total is not None and done >= total
    table.add_row(Text(head, style="bold"), bar, steps, Text("validating" if validating else f"{speed}  {eta}".strip()))
    return table


def _times(state: ProgressState) -> str:
    """Return the times of steps, memory, cores and GPUs, and the learning rate after the last epoch."""
    rate = state.epochs[-1].learning_rate if state.epochs else None
    times = step_times(state.now.timed, state.now.hosts)
    return times if rate is None else f"{times}; learning rate {rate:g}"


class PlainView:
    """Prints lines to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.state = ProgressState()
        self._now = 0.0
        self._printed_at: float | None = None
        self._is_training_job = False
        self._is_stopping = False
        self._began: float | None = None

    def started(self, plan: LaunchPlan) -> None:
        self.state.begin_attempt(tuple(str(task.task) for task in plan.tasks))
        self._printed_at, self._is_training_job = None, plan.mode == "train"
        self._began, self._is_stopping = None, False

    def event(self, event: Event) -> None:
        self.state.add(event)
        training = self.state.now.training
        line = event_line(event, training.epochs if training else 1)
        if line is not None:
            self._print(line)
        # any line shows that the job is alive, so the interval starts again
        if isinstance(event, TrainingStarted) or (line is not None and self._printed_at is not None):
            self._printed_at = self._now
        if (
            isinstance(event, StepsDone)
            and self._printed_at is not None
            and self._now >= self._printed_at + PROGRESS_INTERVAL_S
        ):
            self._printed_at = self._now
            self._print(_progress(self.state))

    def line(self, task: str, text: str) -> None:
        self._print(task_line(task, text, alone=len(self.state.tasks) == 1))

    def note(self, text: str) -> None:
        self._is_stopping = self._is_stopping or is_about_stopping(text)
        self._print(note_line(text))

    def tick(self, now: float) -> None:
        self._now = now
        self._began = now if self._began is None else self._began
        waiting = (
            self.state.now.training is None
            and (self._is_training_job or bool(self.state.missing))
            and not self._is_stopping
        )
        if self._printed_at is None:
            self._printed_at = now
        elif waiting and now >= self._printed_at + PROGRESS_INTERVAL_S:
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
