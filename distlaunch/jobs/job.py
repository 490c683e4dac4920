"""Jobs that train: a run is chosen and claimed, and its attempts are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from distlaunch.base.errors import naming_run
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.backend import ignored_backend
from distlaunch.engines.context import SECONDARY_SRUN_TASK
from distlaunch.jobs.attempt import AttemptResult, checked, plan_attempt, run_attempt, run_beside
from distlaunch.jobs.choose_run import Choice, JobRequest, choose
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.jobs.job_end import judge_result, judging_errors
from distlaunch.jobs.restarts import run_job
from distlaunch.jobs.use import claim_exports
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import shown
from distlaunch.runs.report import newest_training
from distlaunch.supervise.observer import Observer, ThreadedObserver


@dataclass(frozen=True)
class ClaimedRun:
    """A run that is chosen and claimed; nothing is started yet."""

    choice: Choice
    run: RunDir


def begin(
    request: JobRequest,
    observer: Observer,
    machine: Machine,
    on_finished: Callable[[RunDir], None] = lambda run: None,
) -> ClaimedRun | None:
    """Choose the run and claim its directory; return None if there is nothing to do.

    Raises RunBusyError if another launcher works on it.

    Args:
        on_finished: called with a run that is finished already.
    """
    choice = choose(request, machine)
    if choice.run is not None and not (choice.beside or choice.finished):
        # only a look: `execute` takes the lock for good, after the user has seen it
        with naming_run(shown(choice.run.path)), choice.run.lock():
            pass  # nobody goes on with a run that is still going on
    if choice.context.is_secondary_srun_task:
        observer.note(SECONDARY_SRUN_TASK)
        return None
    isolate_if_configured(choice.config, choice.context)
    for warning in () if choice.finished else choice.warnings:
        observer.note(f"warning: {warning}")
    strategy = choice.config.strategy
    if note := ignored_backend(strategy.kind, strategy.backend, machine.environ):
        observer.note(note)
    if choice.note:
        observer.note(choice.note)
    if choice.finished:
        if choice.run is not None:
            on_finished(choice.run)
            if not choice.beside:
                choice.run.forget_secrets()  # its launcher was killed before it could
        return None
    return ClaimedRun(choice, choice.run or RunDir.claim(choice.config.runs_dir, choice.name))


def execute(claimed: ClaimedRun, observer: Observer) -> AttemptResult:
    """Train a claimed run. See `train` for errors."""
    choice, run = claimed.choice, claimed.run
    if choice.beside:
        with naming_run(shown(run.path)), choice.context.engine:
            return checked(run_beside(choice.config, run, observer, choice.context), choice.locate)
    with naming_run(shown(run.path)), ThreadedObserver.of(observer) as threaded, run.lock_claim():
        if choice.uses:
            return _do_uses(choice, run, threaded)
        with judging_errors(run):
            result = run_job(choice.config, run, threaded, choice.context)
        return checked(judge_result(run, result), choice.locate)


def _do_uses(choice: Choice, run: RunDir, observer: Observer) -> AttemptResult:
    """Make the missing exports and evaluations of a finished run; return the last result, or the first failure."""
    config, context = choice.config, choice.context
    result: AttemptResult | None = None
    with context.engine:
        for mode, extra in choice.uses:
            if result is None or not result.outcome.exit_code:
                with contextlib.ExitStack() as stack:
                    if mode == "export":
                        claim_exports(run, config, extra, stack)
                    result = checked(run_attempt(config, run, mode, observer, context, extra=extra), choice.locate)
    assert result is not None, "there is something to do"
    return result


def train(
    request: JobRequest,
    observer: Observer,
    machine: Machine,
    on_run: Callable[[RunDir], None] = lambda run: None,
) -> AttemptResult | None:
    """Train a config or resume a run; return None if the run has already finished.

    Args:
        on_run: called with the run before anything is started, also if nothing is.

    Raises:
        ConfigError: the config is wrong, be it that a worker found out.
        UsageError: the request cannot be fulfilled.
    """
    claimed = begin(request, observer, machine, on_run)
    if claimed is None:
        return None
    on_run(claimed.run)
    return execute(claimed, observer)


def plan(request: JobRequest, machine: Machine) -> tuple[LaunchPlan | None, Choice]:
    """Return the plan of what `train` would start, or None for a finished run. Write nothing."""
    choice = choose(request, machine)
    if choice.finished:
        return None, choice
    run = choice.target_run_dir
    attempt = (newest_training(run) or 0) if choice.beside else run.next_attempt()
    mode, extra = choice.uses[0] if choice.uses else ("train", ())
    return plan_attempt(choice.config, run, attempt, choice.context, mode, extra), choice
