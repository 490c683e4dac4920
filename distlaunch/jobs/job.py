"""Training jobs: choose a run, claim its directory, and execute its attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from distlaunch.base.errors import ConfigError, naming_run
from distlaunch.base.report_page import leaving_page
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.backend import ignored_backend
from distlaunch.config.checks.machine import busy_ports, missing_trackers
from distlaunch.engines.context import SECONDARY_SRUN_TASK
from distlaunch.jobs.attempt import AttemptResult, checked, plan_attempt, run_attempt, run_evaluator_only
from distlaunch.jobs.choose_run import Choice, JobRequest, choose
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.jobs.metrics import Metrics, offering_metrics
from distlaunch.jobs.restarts import run_job
from distlaunch.jobs.temporary_failures import limit_temporary_failures, limiting_temporary_errors
from distlaunch.jobs.tracking import tracking
from distlaunch.jobs.use import claim_exports
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import newest_training
from distlaunch.supervise.late_signals import LateSignals
from distlaunch.supervise.observer import Observer, ThreadedObserver


@dataclass(frozen=True)
class ClaimedRun:
    """A run whose directory is claimed. Nothing is started yet.

    Attributes:
        metrics: where the state of the run is offered while it trains.
    """

    choice: Choice
    run: RunDir
    metrics: Metrics


def begin(
    request: JobRequest,
    observer: Observer,
    machine: Machine,
    on_finished: Callable[[RunDir], None] = lambda run: None,
) -> ClaimedRun | None:
    """Choose the run and claim its directory; return None if there is nothing to do.

    Args:
        on_finished: called with the run if it has already finished.

    Raises:
        RunBusyError: another launcher works on the run.
    """
    choice = choose(request, machine)
    if choice.run is not None and not (choice.evaluator_only or choice.finished):
        # only check that no other launcher holds the lock; `execute` takes it for the whole job
        with naming_run(display_path(choice.run.path)), choice.run.lock():
            pass
    if choice.context.is_secondary_srun_task:
        observer.note(SECONDARY_SRUN_TASK)
        return None
    isolate_if_configured(choice.config, choice.context)
    if not choice.finished:
        trackers = choice.locate(missing_trackers(choice.config.tracking))
        for warning in (*choice.warnings, *map(str, trackers)):
            observer.note(f"warning: {warning}")
    strategy = choice.config.strategy
    if note := ignored_backend(strategy.kind, strategy.backend, machine.environ):
        observer.note(note)
    if choice.note:
        observer.note(choice.note)
    if choice.finished:
        if choice.run is not None:
            on_finished(choice.run)
            if not choice.evaluator_only:
                # the launcher that trained the run may have been killed before it could delete the secrets
                choice.run.forget_secrets()
        return None
    _check_machine(choice)
    # before the claim, since a port may be in use
    metrics = Metrics.open(request.metrics_port, request.metrics_file)
    return ClaimedRun(choice, choice.run or RunDir.claim(choice.config.runs_dir, choice.name), metrics)


def _check_machine(choice: Choice) -> None:
    """Raise ConfigError, with lines of the config, if this machine lacks what the engine or the cluster needs."""
    config, is_training = choice.config, not (choice.evaluator_only or choice.missing_outputs)
    has_ports = is_training and choice.context.given is None
    if problems := [*config.engine.machine_problems(), *(busy_ports(config) if has_ports else ())]:
        raise ConfigError(choice.locate(problems))


def execute(claimed: ClaimedRun, observer: Observer) -> AttemptResult:
    """Train a claimed run, or do the other work that was chosen for it. See `train` for errors."""
    choice, run = claimed.choice, claimed.run
    if choice.evaluator_only:
        with naming_run(display_path(run.path)), choice.context.engine:
            return checked(run_evaluator_only(choice.config, run, observer, choice.context), choice.locate)
    late = LateSignals()
    with (
        naming_run(display_path(run.path)),
        leaving_page(run, choice.context.machine.environ),  # writes the page after the lock is released
        ThreadedObserver.of(observer, late) as threaded,
        run.lock_claim(),
    ):
        if choice.missing_outputs:
            result = _make_missing_outputs(choice, run, threaded, late)
            late.exit_code = int(result.outcome.exit_code)
            return result
        environ = choice.context.machine.environ
        with (
            tracking(run, choice.config.tracking, environ, threaded.note, late.end_waits),
            offering_metrics(run, claimed.metrics, environ, threaded.note),
            limiting_temporary_errors(run),
        ):
            result = run_job(choice.config, run, threaded, choice.context, late)
        result = limit_temporary_failures(run, result)
        late.exit_code = int(result.outcome.exit_code)
        return checked(result, choice.locate)


def _make_missing_outputs(choice: Choice, run: RunDir, observer: Observer, late: LateSignals) -> AttemptResult:
    """Make the missing exports and evaluations of a finished run.

    Args:
        late: handles the stop signals after the last of them.

    Returns:
        The result of the first attempt that failed; if none failed, that of the last one.
    """
    config, context = choice.config, choice.context
    result: AttemptResult | None = None
    with context.engine:
        for mode, extra in choice.missing_outputs:
            if result is None or not result.outcome.exit_code:
                with contextlib.ExitStack() as stack:
                    if mode == "export":
                        claim_exports(run, config, extra, stack)
                    result = checked(run_attempt(config, run, mode, observer, context, extra=extra), choice.locate)
        late.take_over()
    assert result is not None, "at least one output is missing"
    return result


def train(
    request: JobRequest,
    observer: Observer,
    machine: Machine,
    on_run: Callable[[RunDir], None] = lambda run: None,
) -> AttemptResult | None:
    """Train a config or resume a run; return None if this process has nothing to do.

    Args:
        on_run: called with the run before anything is started, also if it has already finished.

    Raises:
        ConfigError: the config is wrong. A task may be the first to detect that.
        UsageError: the request cannot be fulfilled.
    """
    claimed = begin(request, observer, machine, on_run)
    if claimed is None:
        return None
    on_run(claimed.run)
    return execute(claimed, observer)


def plan(request: JobRequest, machine: Machine) -> tuple[LaunchPlan | None, Choice]:
    """Return the plan of the tasks that `train` would start, or None if nothing is left to do. Write nothing."""
    choice = choose(request, machine)
    if choice.finished:
        return None, choice
    if problems := list(choice.config.engine.machine_problems()):
        raise ConfigError(choice.locate(problems))
    run = choice.target_run_dir
    attempt = (newest_training(run) or 0) if choice.evaluator_only else run.next_attempt()
    mode, extra = choice.missing_outputs[0] if choice.missing_outputs else ("train", ())
    return plan_attempt(choice.config, run, attempt, choice.context, mode, extra), choice
