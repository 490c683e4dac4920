"""Views of events, at 80 columns and without colour."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from distlaunch.base.events import (
    DataResolved,
    EpochEnded,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    StepsDone,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.ui import words
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import event_line, restarts, task_line
from distlaunch.ui.progress.live import LiveView, PlainView, progress_line
from distlaunch.ui.progress.state import ProgressState

START = TrainingStarted(
    strategy="multi_worker_mirrored", loop="fit", replicas=2, tasks=2, global_batch=128, epochs=10, first_epoch=0,
    first_step=0, steps_per_epoch=469, parameters=1,
)  # fmt: skip
LOGS = {"loss": 0.25, "accuracy": 0.9}


def steps(epoch: int, in_epoch: int, seconds: float = 1.0, num: int = 100) -> StepsDone:
    step = epoch * 469 + in_epoch
    return StepsDone(epoch=epoch, step=step, step_in_epoch=in_epoch, steps=num, seconds=seconds, logs=LOGS)


def make_plan() -> LaunchPlan:
    run = RunDir("/r")
    tasks = tuple(TaskPlan(Task("worker", i), ("x",), {}, run.task(0, f"worker:{i}")) for i in range(2))
    return LaunchPlan(run.path, 0, "train", tasks, 300, 30)


def render(state: ProgressState) -> str:
    console = Console(file=io.StringIO(), width=80, no_color=True)
    console.print(progress_line(state))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def test_the_bar_fits_80_columns() -> None:
    line = render(ProgressState.of([START, steps(2, 100), steps(2, 200)]))
    assert len(line) == 80
    assert line.startswith("epoch 3/10 ━")
    assert line.endswith("200/469 100 steps/s  eta 0:36")


def test_the_first_call_of_an_attempt_tells_nothing_about_the_time_that_is_left() -> None:
    """It compiles: a minute for one step would make hours of a run of minutes."""
    compiled = [START, steps(0, 1, seconds=60.0, num=1)]
    assert ProgressState.of(compiled).eta_s is None
    assert "eta" not in render(ProgressState.of(compiled))
    shorter = [*compiled, steps(0, 38, seconds=40.0, num=37)]
    assert ProgressState.of(shorter).eta_s is None, "another program, which is compiled too"
    assert "steps/s" not in render(ProgressState.of(shorter))
    going = [*shorter, steps(0, 138), steps(0, 101)]
    assert ProgressState.of(going).eta_s == pytest.approx(45.89)
    again = ProgressState.of([*going, START, steps(0, 1, seconds=60.0, num=1)])
    assert again.eta_s is None, "the next attempt compiles again"


def test_one_slow_call_does_not_change_the_time_that_is_left() -> None:
    """It compiles another program, or waits for a disk."""
    going = [START, *(steps(0, number * 50, num=50, seconds=0.5) for number in range(1, 5))]
    slow = [*going, steps(0, 201, num=1, seconds=30.0), steps(0, 202, num=1, seconds=30.0)]
    assert ProgressState.of(slow).steps_per_s == pytest.approx(100)
    uneven = [START, *(steps(0, number, num=number, seconds=number / 100) for number in (90, 91, 89, 92))]
    assert ProgressState.of(uneven).steps_per_s == pytest.approx(100), "no number of steps comes twice"


def test_the_bar_between_epochs_shows_the_next() -> None:
    ended = EpochEnded(epoch=2, step=1407, seconds=5, logs=LOGS)
    assert render(ProgressState.of([START, steps(2, 469), ended])).startswith("epoch 4/10")


def test_the_bar_without_a_known_length() -> None:
    start = TrainingStarted(**{**START.__dict__, "steps_per_epoch": None})
    assert "200 steps" in render(ProgressState.of([start, steps(0, 200)]))


def test_validation_is_told() -> None:
    assert render(ProgressState.of([START, steps(2, 469)])).endswith("469/469 validating")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.number(0.25), "0.2500"),
        (words.number(0), "0.0000"),
        (words.number(1234567.0), "1.235e+06"),
        (words.number(3.2e-5), "3.2e-05"),
        (words.number(float("nan")), "nan"),
        (words.duration(3.21), "3.2 s"),
        (words.duration(83), "1 min 23 s"),
        (words.duration(59.99), "1 min 00 s"),
        (words.duration(7500), "2 h 05 min"),
        (words.clock(3723), "1:02:03"),
        (words.clock(7), "0:07"),
        (words.size(999), "999 B"),
        (words.size(1_234_567), "1.2 MB"),
        (count(1, "step"), "1 step"),
        (count(1234, "step"), "1,234 steps"),
        (words.metrics({"loss": 0.5, "acc": 0.25, "val_loss": 0.75}), "loss 0.5000, val 0.7500  acc 0.2500"),
        (words.metrics({"val_loss": 0.75}), "val_loss 0.7500"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert text == expected


def test_plain_lines(golden: Callable[[str, str], None]) -> None:
    """Plain output has one line for each epoch, and at most one line of progress every ten seconds."""
    console = Console(file=io.StringIO(), width=80)
    view = PlainView(console)
    view.started(make_plan())
    script: list[Event | float] = [
        0.0, 11.0, TaskStarted(task="worker:0", host="a", pid=1), 22.0, TaskStarted(task="worker:1", host="b", pid=2),
        33.0, DataResolved(name="mine:data", source="mine:data"), 44.0,
        START, 45.0, steps(0, 100), 56.0, steps(0, 200), 57.0, steps(0, 300), 58.0, steps(0, 469),
        EpochEnded(epoch=0, step=469, seconds=13.5, logs={**LOGS, "val_loss": 0.3, "val_accuracy": 0.85}), 59.0,
        Notice(level="warning", message="careful"), steps(1, 100), 70.0, steps(1, 200),
        RunEnded(status="done", step=938, epochs_done=2, seconds=50),
    ]  # fmt: skip
    for entry in script:
        if isinstance(entry, float):
            view.tick(entry)
        else:
            view.event(entry)
    view.line("worker:1", "[bold]not markup[/bold] " + "long " * 30)
    view.note("stopping")
    view.ended()
    assert isinstance(console.file, io.StringIO)
    golden("ui/plain.txt", console.file.getvalue())


def test_nothing_is_waited_for_once_the_job_stops() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = PlainView(console)
    view.started(make_plan())
    for now in (0.0, 10.0, 20.0):
        view.tick(now)
    view.note("worker:0 failed; stopping worker:1")
    view.tick(31.0)
    assert isinstance(console.file, io.StringIO)
    names = "waiting for worker:0, worker:1"
    told = f"{names} (10 s so far)\n{names} (20 s so far)\nworker:0 failed; stopping worker:1\n"
    assert console.file.getvalue() == told


def test_the_evaluator_has_a_line_of_its_own() -> None:
    """It must not disturb what is known of the run itself."""
    result = Evaluated(task="evaluator:0", step=200, split="validation", logs={"loss": 0.41, "accuracy": 0.88})
    state = ProgressState.of([START, steps(0, 200), result])
    assert (state.evaluated, state.logs, state.step, state.sidecar) == (None, LOGS, 200, result)
    line = event_line(result, 10)
    assert line is not None
    assert line.plain == "evaluator  step 200  loss 0.4100  accuracy 0.8800"
    own = Evaluated(task="chief:0", step=200, split="validation", logs={"loss": 0.4})
    assert event_line(own, 10) is None
    assert ProgressState.of([own]).evaluated == own


def test_restarts_are_told_and_counted() -> None:
    again = TaskRestarted(restarted_task="worker:1", host="a", reason="was killed by SIGKILL")
    state = ProgressState.of([again, again, TaskRestarted(restarted_task="ps:0", host="a", reason="x")])
    state.add(TaskFailed(failed_task="ps:0", host="a", reason="x", log=""))
    state.begin_attempt(("chief:0",))
    assert restarts(state.restarts, state.job_restarts) == "the job once, ps:0 once, worker:1 twice"
    assert restarts({"worker:1": 3}, 0) == "worker:1 3 times"
    line = event_line(again, 1)
    assert line is not None
    assert line.plain == "worker:1 was killed by SIGKILL; restarted"


def test_the_terminal_is_left_clean() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    view = LiveView(console)
    view.started(make_plan())
    view.tick(0)
    for now, event in enumerate([START, steps(0, 100), EpochEnded(epoch=0, step=469, seconds=1, logs=LOGS)], 1):
        view.event(event)
        view.tick(now)
    view.line("worker:1", "hello [red]")
    view.ended()
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "hello [red]" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize(
    ("task", "alone", "line"),
    [
        ("worker:1", False, "[worker:1] a text"),
        ("worker:1", True, "a text"),
        ("chief:0", False, "[chief:0] a text"),
        ("host1", False, "[host1] a text"),  # of an agent, such as of a full disk
        ("host1", True, "[host1] a text"),
        ("me@second:22", False, "[me@second:22] a text"),
        ("fe80::1", False, "[fe80::1] a text"),
        ("fe80::a", False, "[fe80::a] a text"),
        ("", False, "a text"),
        ("", True, "a text"),
    ],
)
def test_who_says_it(task: str, alone: bool, line: str) -> None:
    assert task_line(task, "a text", alone=alone).plain == line


@pytest.mark.parametrize(("terminal", "columns", "num_lines"), [(False, None, 1), (False, "20", 3), (True, None, 2)])
def test_only_a_terminal_breaks_lines(
    terminal: bool, columns: str | None, num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    console = JobConsole(file=file, force_terminal=terminal, width=40 if terminal else None)
    console.print("the last checkpoint cannot be written: no room left")
    text = file.getvalue()
    assert len(text.splitlines()) == num_lines, text
