"""Attempts that use a trained model instead of training it: evaluate, predict, export."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from distlaunch.base.errors import RunBusyError, StopRequested, UsageError, naming_run
from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import DataResolved
from distlaunch.base.folders import make_folder
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.base.run_files.run_lock import lock_run, owner_of
from distlaunch.cluster.machine import Machine
from distlaunch.config.backend import ignored_backend
from distlaunch.config.references.modules import ModuleMissingError, find_source
from distlaunch.config.run import RunConfig
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, checked, run_attempt
from distlaunch.jobs.checkpoint_model import with_model_of_checkpoint
from distlaunch.jobs.choose_run import config_for_use, load_config_of
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.jobs.list_checkpoint import check_checkpoint_exists
from distlaunch.plan.train import Mode
from distlaunch.runs.find import open_run
from distlaunch.runs.paths import display_path
from distlaunch.supervise.observer import Observer, ThreadedObserver


def run_on_checkpoint(
    path: str,
    mode: Mode,
    overrides: Sequence[str],
    extra: Sequence[str],
    observer: Observer,
    machine: Machine,
    checkpoint: int | BestName | None = None,
) -> AttemptResult:
    """Evaluate, predict or export with a checkpoint of a run, in new processes.

    Args:
        mode: the kind of use.
        extra: arguments for the tasks.
        checkpoint: the step of the checkpoint, `best` for that of the best epoch, or None for the newest.
    """
    run = open_run(path)
    if not run.has_config():
        raise UsageError(f"{display_path(run.path)} is a run of a script: distlaunch does not know its model")
    if checkpoint is not None:
        check_checkpoint_exists(run, checkpoint)
        extra = [*extra, "--checkpoint", str(checkpoint)]
    config, locate, warnings = load_config_of(run, overrides, machine, observer.note)
    config = with_model_of_checkpoint(config, run, checkpoint, overrides, machine, observer.note)
    for warning in warnings:
        observer.note(f"warning: {warning}")
    if note := ignored_backend(config.strategy.kind, config.strategy.backend, machine.environ):
        observer.note(note)
    if not overrides and list(extra[:2]) == ["--split", "validation"]:
        check_has_validation(run, config, mode)
    config = config_for_use(config, machine)
    context = LaunchContext.resolve(config, machine)
    isolate_if_configured(config, context)
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming_run(display_path(run.path)))
        if mode == "export":
            claim_exports(run, config, extra, stack)
        original_path = run.path
        if not run.may_be_written():
            extra = [*extra, *_output_elsewhere(mode, extra)]
            observer.note(f"{display_path(run.path)} is read-only: nothing is recorded there")
            run = stack.enter_context(read_only_copy(run))
        threaded = stack.enter_context(ThreadedObserver.of(observer))
        stack.enter_context(context.engine)
        try:
            result = checked(run_attempt(config, run, mode, threaded, context, extra=extra), locate)
        except StopRequested as asked:
            # unlike `train`, this command leaves nothing to resume: exit as after an unhandled signal
            asked.exit_code = 128 + asked.number
            raise
        outcome = replace(result.outcome, exit_code=result.outcome.code_of_command)
        return replace(result, plan=replace(result.plan, run_dir=original_path), outcome=outcome)


def claim_exports(run: RunDir, config: RunConfig, extra: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Lock the export formats to be written until `stack` is closed.

    Raises:
        UsageError: the run cannot be written to.
        RunBusyError: another process is writing one of the formats.
    """
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise UsageError(
            f"{display_path(run.path)} is read-only, and an export is written into the run; copy the run first"
        )
    # without a format, the kind of model decides between these two
    formats = extra[1].split(",") if extra[:1] == ["--formats"] else config.export or ["keras", "saved_model"]
    for kind in sorted(formats):
        try:
            stack.enter_context(lock_run(run.export_lock(kind)))
        except RunBusyError:
            owner = owner_of(run.export_lock(kind))
            who = owner.description if owner is not None else "another process"
            message = f"{display_path(run.path)}: {who} is writing its export as {kind}; wait until it has finished"
            raise RunBusyError(message) from None


def _output_elsewhere(mode: Mode, extra: Sequence[str]) -> list[str]:
    """Return the arguments that write predictions outside a read-only run.

    Raises:
        UsageError: the current directory is read-only, too.
    """
    if mode != "predict" or "--output" in extra:
        return []
    if not os.access(".", os.W_OK | os.X_OK):
        raise UsageError("the run and the current directory are read-only; add --output FILE")
    return ["--output", str(Path(f"predictions-{extra[1]}.npz").absolute())]


def check_has_validation(run: RunDir, config: RunConfig, command: str) -> None:
    """Raise UsageError if the data function returned no validation data and its code has not changed since.

    Args:
        command: the command that needs validation data, such as `evaluate`.
    """
    read = read_events_of(run.events, DataResolved)
    if not read or "validation" in read[-1].examples or "validation" in read[-1].seen:
        return
    if _may_have_changed(config, since=read[-1].time):
        return
    message = f"{display_path(run.path)} has no validation data: {read[-1].name} returned none"
    advice = f"{command} the training data with `--split train`, or make the function return validation data"
    raise UsageError(f"{message}; {advice}")


def _may_have_changed(config: RunConfig, *, since: float) -> bool:
    """Return True if the data function's file or a Python file beside it is newer, or if that is unknown."""
    if config.data.function is None:
        return False
    module = config.data.function.rpartition(":")[0]
    try:
        source = Path(module) if module.endswith(".py") else find_source(module, config.modules_folder)
        return source is None or any(file.stat().st_mtime > since for file in source.parent.glob("*.py"))
    except (OSError, ModuleMissingError):
        return True


@contextlib.contextmanager
def read_only_copy(run: RunDir) -> Generator[RunDir]:
    """Yield a temporary run directory with links to the files of a read-only run. Attempts can write into it."""
    with tempfile.TemporaryDirectory(prefix="distlaunch-read-") as folder:
        copy = RunDir(Path(folder) / run.name)
        copy.path.mkdir()
        for path in (run.config, run.events, run.environment, run.checkpoints):
            if path.exists():
                (copy.path / path.name).symlink_to(path)
        # each layer instead of their folder, in which processes lock files and a moved run gets a copy of its layer
        for path in run.preprocessing("").parent.glob("*.keras"):
            make_folder(copy.preprocessing("").parent)
            (copy.preprocessing("").parent / path.name).symlink_to(path)
        yield copy
