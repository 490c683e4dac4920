"""The output at the end of a run: the summary, or the failure and what to do next."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlaunch.base.errors import about_run
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.jobs.smoke import SmokeResult
from distlaunch.runs.bottleneck import find_bottleneck
from distlaunch.runs.goodput import run_goodput
from distlaunch.runs.paths import display_path
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.ui import words
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import (
    STATUS_STYLES,
    data_source,
    goodput_text,
    numbers_text,
    optimizer_text,
    restarts,
    skipped,
    step_times,
    training_start,
)
from distlaunch.ui.progress.state import ProgressState
from distlaunch.ui.runs import NO_CHECKPOINT


def print_summary(console: Console, state: ProgressState, result: AttemptResult) -> None:
    """Print the table at the end of a training."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    outcome = result.outcome
    table.add_row("status", Text(outcome.status, style=STATUS_STYLES[outcome.status]))
    table.add_row("run", display_path(result.plan.run_dir))
    for name, value in _facts(state, RunDir(result.plan.run_dir), outcome.failure.reason if outcome.failure else ""):
        table.add_row(name, value)
    if outcome.status in ("stopped", "interrupted") and result.plan.mode == "train" and result.resumable:
        table.add_row("next", _resume_command(result) + _note_without_checkpoint(result))
    console.print()
    _print_table(console, table)
    print_metrics(console, state.epochs[-1].logs if state.epochs else {})


def print_metrics(console: Console, logs: dict[str, float], split: str = "train") -> None:
    """Print the value of each metric, next to its validation value."""
    names = list(dict.fromkeys(name.removeprefix("val_") for name in logs))
    if not names:
        return
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", show_edge=False)
    has_train, has_validation = any(name in logs for name in names), any(f"val_{name}" in logs for name in names)
    table.add_column("metric")
    if has_train:
        table.add_column(split, justify="right")
    if has_validation:
        table.add_column("validation", justify="right")
    for name in names:
        values = [logs.get(name)] * has_train + [logs.get(f"val_{name}")] * has_validation
        table.add_row(name, *("" if value is None else words.number(value) for value in values))
    console.print()
    _print_table(console, table)


def print_failure(console: Console, state: ProgressState, result: AttemptResult) -> None:
    """Print in one piece which task failed first, why, the traceback or log lines, and what to do next."""
    failure = result.outcome.failure
    if failure is None:
        return
    line = failure_line(result)
    what = _what_failed(result)
    head = Text.assemble(what, (" failed", "red bold"), line[len(what) + len(" failed") :])
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    if failure.log is not None:
        table.add_row("log", display_path(failure.log))
    if failure.hint:
        table.add_row("hint", failure.hint)
    if result.plan.mode == "train" and (steps := _next(failure, state, result)):
        table.add_row("next", steps)
    with console.capture() as captured:
        console.print()
        console.print(head, highlight=False)
        if failure.detail:
            console.print()
            console.print(Text("\n".join(f"  {line}" for line in failure.detail)), highlight=False, soft_wrap=True)
        console.print()
        console.print(table, highlight=False, markup=False)
    _print_lines(console, captured.get())


def failure_line(result: AttemptResult) -> str:
    """Return a sentence with the failed run, the task and the reason, or an empty string."""
    failure = result.outcome.failure
    if failure is None:
        return ""
    who = f" {failure.task} on {failure.host}" if len(result.plan.tasks) > 1 else ""
    at = f" at step {failure.step:,}" if failure.step is not None else ""
    return f"{_what_failed(result)} failed{':' if who else ''}{who}{at}: {failure.reason}"


def _what_failed(result: AttemptResult) -> str:
    run = display_path(result.plan.run_dir)
    return run if result.plan.is_run else f"{run}: {result.plan.mode}"


def warning_lines(result: AttemptResult) -> list[str]:
    """Return the warnings about an attempt, each with the name of the run."""
    run = display_path(result.plan.run_dir)
    return [about_run(run, warning) for warning in result.outcome.warnings]


def print_warnings(console: Console, result: AttemptResult) -> None:
    for warning in warning_lines(result):
        console.print(Text.assemble(("warning: ", "yellow bold"), warning), highlight=False)


def _print_table(console: Console, table: Table) -> None:
    """Print a table without trailing blanks."""
    with console.capture() as captured:
        console.print(table, highlight=False, markup=False)
    _print_lines(console, captured.get())


def _print_lines(console: Console, text: str) -> None:
    """Print rendered text in one piece and without the trailing blanks with which rich pads columns."""
    lines = [line.rstrip() for line in text.splitlines()]
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True, highlight=False)


def _next(failure: Failure, state: ProgressState, result: AttemptResult) -> str:
    """Return what to do first, and the command that resumes the run."""
    if not (failure.resumable and result.resumable):
        return failure.first
    last = state.checkpoints[-1] if state.checkpoints else state.restored
    at = f" (resumes from step {last.step:,})" if last else _note_without_checkpoint(result)
    command = _resume_command(result)
    return f"{failure.first}, then {command}{at}" if failure.first else f"{command}{at}"


def _note_without_checkpoint(result: AttemptResult) -> str:
    """Return a note if the run has no checkpoint. Disks of other machines may have one."""
    may_have_one = result.plan.elsewhere or RunDir(result.plan.run_dir).checkpoint_steps()
    return "" if may_have_one else f" ({NO_CHECKPOINT})"


def _resume_command(result: AttemptResult) -> str:
    if result.plan.elsewhere:
        return "repeat the command on every machine with --resume"
    run = RunDir(result.plan.run_dir)
    if run.live_submission() is not None:  # this attempt belongs to a batch job, whose script may requeue it
        return f"distlaunch submit {display_path(run.path)} --resume, unless the job is requeued automatically"
    return f"distlaunch train {display_path(run.path)} --resume"


def _facts(state: ProgressState, run: RunDir, failure: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if state.now.training is not None:
        rows += [("strategy", training_start(state.now.training)), ("trained", _trained(state))]
        if optimizer := optimizer_text(state.now.training, state.epochs):
            rows.append(("optimizer", optimizer))
    if state.now.timed:
        rows.append(("steps", step_times(state.now.timed, state.now.hosts)))
    if slow := find_bottleneck(state.now.timed):
        rows.append(("input", str(slow)))
    if (goodput := run_goodput(run)) is not None and goodput.notable_losses:
        rows.append(("goodput", goodput_text(goodput, goodput.notable_losses)))
    if state.restarts or state.job_restarts:
        rows.append(("restarts", restarts(state.restarts, state.job_restarts)))
    if state.data is not None:
        rows.append(("data", data_source(state.data)))
    if state.skipped:
        rows.append(("left out", skipped(state.skipped)))
    if numbers := numbers_text(state.numbers, failure):
        rows.append(("numbers", numbers))
    if state.checkpoints:
        saved = state.checkpoints[-1]
        rows.append(("checkpoint", f"{display_path(saved.path)} ({words.size(saved.num_bytes)})"))
    rows += [("export", display_path(path)) for path in state.exports.values()]
    return rows


def _trained(state: ProgressState) -> str:
    start = state.now.training
    assert start is not None
    steps = state.step - start.first_step
    epoch_seconds = sum(epoch.seconds for epoch in state.epochs if epoch.attempt == start.attempt)
    seconds = state.now.ended.seconds if state.now.ended else epoch_seconds
    resumed = f", from step {start.first_step:,} to {state.step:,}" if start.first_step else ""
    return f"{count(steps, 'step')} in {words.duration(seconds)}{resumed}; {_epochs(state)}"


def _epochs(state: ProgressState) -> str:
    first = state.now.training.first_epoch if state.now.training else 0
    complete = state.epochs[-1].epoch + 1 if state.epochs else first
    total = state.now.training.epochs if state.now.training else complete
    return f"{complete} of {count(total, 'epoch')} complete"


def print_proofs(result: SmokeResult, config: str, *, to_stderr: bool) -> None:
    """Print the name of the config, and a line for each statement that was tested."""
    console = JobConsole(stderr=to_stderr)
    lines = [Text(f"smoke test of {config}:")]
    for proof in result.proofs:
        word = ("  ok  ", "green bold") if proof.holds else (" no   ", "red bold")
        lines.append(Text.assemble(word, proof.statement if proof.holds else f"{proof.statement}: not reached"))
    with contextlib.suppress(OSError):
        console.print()
        console.print(Text("\n").join(lines), soft_wrap=True, highlight=False)


def print_missing(result: SmokeResult) -> None:
    """Print on standard error which statements a smoke run could not prove."""
    with contextlib.suppress(OSError):
        for line in missing_proofs(result):
            JobConsole(stderr=True).print(Text(f"error: {line}"), soft_wrap=True, highlight=False)


def missing_proofs(result: SmokeResult) -> list[str]:
    """Return the statements that a smoke run could not prove, with the name of the run."""
    run = display_path(result.last.plan.run_dir)
    return [about_run(run, f"not reached: {proof.statement}") for proof in result.proofs if not proof.holds]
