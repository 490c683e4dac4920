"""The summary at the end of a training."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from rich.console import Console

from distlaunch.base.errors import ExitCode
from distlaunch.base.events import EpochEnded, RunEnded, StepsDone, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import Submission
from distlaunch.cluster.spec import Task
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.outcome import Outcome
from distlaunch.ui.progress.state import ProgressState
from distlaunch.ui.report import print_failure, print_summary

START = TrainingStarted(strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=4, first_epoch=0,
                        first_step=0, steps_per_epoch=10, parameters=1)  # fmt: skip


def summary(state: ProgressState, run: RunDir | None = None, status: str = "done") -> str:
    run = run or RunDir("/r")
    task = TaskPlan(Task("worker", 0), ("x",), {}, run.task(0, "worker:0"))
    plan = LaunchPlan(run.path, 0, "train", (task,), 300, 30)
    console = Console(file=io.StringIO(), width=300, no_color=True)
    print_summary(console, state, AttemptResult(plan, Outcome(status, ExitCode.DONE)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_steps_and_time_are_those_of_the_last_attempt() -> None:
    state = ProgressState()
    for event in (
        START,
        EpochEnded(epoch=0, step=10, seconds=100.0, logs={}),
        dataclasses.replace(START, attempt=1, first_epoch=1, first_step=10),
        EpochEnded(attempt=1, epoch=1, step=20, seconds=3.0, logs={}),
        EpochEnded(attempt=1, epoch=2, step=30, seconds=4.0, logs={}),
    ):
        state.add(event)
    assert "20 steps in 7.0 s, from step 10 to 30; 3 of 4 epochs complete" in summary(state)
    state.add(RunEnded(attempt=1, status="done", step=30, epochs_done=3, seconds=8.5))
    assert "20 steps in 8.5 s, from step 10 to 30; 3 of 4 epochs complete" in summary(state)


def test_how_a_run_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert f"distlaunch train {tmp_path} --resume (" in summary(ProgressState(), run, "stopped")
    run.write_submission(Submission("slurm", "17", 0.0))
    again = f"distlaunch submit {tmp_path} --resume, unless the job is requeued automatically ("
    assert again in summary(ProgressState(), run, "stopped")
    run.batch_exit.write_text("3")
    assert f"distlaunch train {tmp_path} --resume (" in summary(ProgressState(), run, "stopped")


def test_a_failed_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    task = TaskPlan(Task("worker", 0), ("x",), {}, RunDir(tmp_path).task(0, "worker:0"))
    plan = LaunchPlan(tmp_path, 0, "train", (task,), 300, 30)
    failure = Failure("worker:0", "a", "it failed", (), None, first="fix bug.py:1")
    console = Console(file=io.StringIO(), width=300, no_color=True)
    print_failure(console, ProgressState(), AttemptResult(plan, Outcome("failed", ExitCode.FAILED, failure)))
    assert isinstance(console.file, io.StringIO)
    told = f"fix bug.py:1, then distlaunch train {tmp_path} --resume (from the beginning: there is no checkpoint)"
    assert told in console.file.getvalue()


def test_only_notable_losses_are_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def write(scale: float) -> None:
        steps = StepsDone(epoch=0, step=10, step_in_epoch=10, steps=10, seconds=4 * scale, logs={})
        events = [
            (0, 0, START), (4, 0, steps), (10, 1, dataclasses.replace(START, first_step=5)), (14, 1, steps),
        ]  # fmt: skip
        lines = [dataclasses.replace(each, time=1e9 + at * scale, attempt=attempt) for at, attempt, each in events]
        run.events.write_text("\n".join(line.to_json() for line in lines))

    write(1.0)
    assert "goodput" not in summary(ProgressState(), run), "two lost seconds are nothing"
    write(10.0)
    (line,) = [line for line in summary(ProgressState(), run).splitlines() if line.startswith("goodput")]
    assert " ".join(line.split()) == "goodput 43 % of 2 min 20 s in steps that count; lost 14 %"
