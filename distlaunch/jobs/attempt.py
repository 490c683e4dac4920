"""Plans an attempt of a run, writes its files, and executes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distlaunch.base.errors import ConfigError, DistlaunchError, ExitCode, Problem, UsageError
from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import ExportFailed
from distlaunch.base.folders import make_folder
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.base.run_files.earlier_state import EarlierState
from distlaunch.cluster.environment import describe_environment
from distlaunch.cluster.hosts import TooFewSlotsError
from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.config.checks.config import cross_check, fitting_workers
from distlaunch.config.cluster import WorkerRange
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Needs
from distlaunch.engines.context import LaunchContext
from distlaunch.plan.train import (
    LaunchPlan,
    Mode,
    cluster_at,
    config_mark_arguments,
    fit_config,
    plan_launch,
)
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import newest_training
from distlaunch.supervise.allocation import Allocation, Starter
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.requests import SignalPipe
from distlaunch.supervise.run_events import write_end, write_start
from distlaunch.supervise.supervisor import Supervisor


@dataclass(frozen=True)
class AttemptResult:
    """An executed attempt and its end.

    Attributes:
        resumable: whether a later resume makes sense; False for a smoke run.
    """

    plan: LaunchPlan
    outcome: Outcome
    resumable: bool = True


def count_workers(config: RunConfig, context: LaunchContext, *, dry: bool = False) -> RunConfig:
    """Return the config with its number of workers filled in.

    For `auto`, it is the largest number that fits the slots and the config.

    Args:
        dry: see `Engine.count_slots`.

    Raises:
        ConfigError: not even one worker fits the config.
        UsageError: hosts cannot be used.
    """
    if config.cluster.workers != "auto":
        return config
    if context.given is not None:
        return fit_config(config, context.given[0])
    slots = context.engine.count_slots(dry=dry)
    num_gpus = len(context.machine.gpus)
    number = fitting_workers(config, range(slots, 0, -1), num_gpus)
    if number is None:
        raise ConfigError(cross_check(config.with_workers(1), num_gpus))
    return config.with_workers(number)


def plan_attempt(
    config: RunConfig,
    run: RunDir,
    attempt: int,
    context: LaunchContext,
    mode: Mode = "train",
    extra: Sequence[str] = (),
) -> LaunchPlan:
    """Return the plan of an attempt without reserving or writing anything."""
    from distlaunch.config.read.load import dump_config

    least = min_workers(config)
    config, allocation = allocate_fitting(count_workers(config, context, dry=True), context, least, dry=True)
    config = fit_to_allocation(config, allocation)
    return plan_allocated(config, run, attempt, mode, allocation, [*extra, *config_mark_arguments(dump_config(config))])


def fit_to_allocation(config: RunConfig, allocation: Allocation) -> RunConfig:
    """Return the config with the number of workers that the allocation's cluster has."""
    cluster, here = _cluster(config, allocation)
    return config if here is None else fit_config(config, cluster)


def plan_allocated(
    config: RunConfig, run: RunDir, attempt: int, mode: Mode, allocation: Allocation, extra: Sequence[str] = ()
) -> LaunchPlan:
    """Return the launch plan of a config that fits the allocation."""
    cluster, here = _cluster(config, allocation)
    places, engine = allocation.places, allocation.engine
    return plan_launch(
        config, run, attempt, mode, cluster, here=here, places=places, extra=extra, engine=engine,
        recorded=run.recorded_settings(),
    )  # fmt: skip


def import_ahead(config: RunConfig, run: RunDir, mode: Mode, context: LaunchContext) -> None:
    """Start to import the modules that an attempt will need. Ignore errors: the attempt itself reports them."""
    with contextlib.suppress(DistlaunchError):
        allocation = allocate(config, context, dry=True)
        allocation.import_ahead(plan_allocated(fit_to_allocation(config, allocation), run, 0, mode, allocation))


def allocate_fitting(
    config: RunConfig, context: LaunchContext, least: int, *, dry: bool = False
) -> tuple[RunConfig, Allocation]:
    """Return the config with the largest number of workers that fits, and its allocation.

    Hosts that have failed twice are used only if the other hosts do not have enough slots. See `Engine.allocate` for
    errors.

    Args:
        least: the smallest number of workers to accept.
    """
    avoids_failed_hosts = True
    while True:
        try:
            return config, allocate(config, context, dry=dry, avoids_failed_hosts=avoids_failed_hosts)
        except TooFewSlotsError as error:
            fewer = range(error.slots, least - 1, -1)
            number = fitting_workers(config, fewer, len(context.machine.gpus))
            if number is not None:
                config = config.with_workers(number)
            elif avoids_failed_hosts:
                avoids_failed_hosts = False
            else:
                raise


def min_workers(config: RunConfig) -> int:
    """Return the smallest number of workers with which the job may continue."""
    workers = config.cluster.workers
    return workers.min if isinstance(workers, WorkerRange) else 1 if workers == "auto" else workers


def allocate(
    config: RunConfig, context: LaunchContext, *, dry: bool = False, avoids_failed_hosts: bool = True
) -> Allocation:
    """Return hosts, devices and addresses for the tasks of a config. See `Engine.allocate` for errors."""
    jobs = config.strategy.processes(config.cluster)
    count = sum(jobs.values())
    # the evaluator needs no address, since no task connects to it
    needs = Needs((count or 1) + config.cluster.evaluator, count, jobs, config.cluster.ports,
                  config.restarts.window_s, avoids_failed_hosts)  # fmt: skip
    return context.engine.allocate(needs, dry=dry)


def _cluster(config: RunConfig, allocation: Allocation) -> tuple[ClusterSpec, Task | None]:
    """Return the cluster, and the only task of it that is started here (None if all are started here)."""
    if allocation.given is not None:
        return allocation.given
    addresses = [place.address for place in allocation.places if place.address]
    return cluster_at(config.strategy.processes(config.cluster) if addresses else {}, addresses), None


def run_attempt(
    config: RunConfig,
    run: RunDir,
    mode: Mode,
    observer: Observer,
    context: LaunchContext,
    *,
    extra: Sequence[str] = (),
    signals: SignalPipe | None = None,
    workers: int | None = None,
    on_start: Callable[[Starter], None] = lambda starter: None,
) -> AttemptResult:
    """Run the next attempt of a run.

    The caller must hold the lock of the run and have entered the engine.

    Args:
        signals: the pipe of a caller that handles signals over several attempts; None to handle them here.
        workers: the number of workers of this attempt if the config gives a range; None for the number in the config.
        on_start: see `Supervisor`.

    Raises:
        StopRequested: a stop signal came before the tasks were started.
    """
    from distlaunch.config.read.load import dump_config
    from distlaunch.config.resume import keep_preprocessing

    began = time.monotonic()
    earlier = EarlierState.of(run)
    full_config, is_new = config, not run.exists()
    with contextlib.nullcontext() if signals is None else signals.raising():
        config = count_workers(config, context)
        config = config.with_workers(workers or config.cluster.num_workers)
        wanted = config.cluster.num_workers
        config, allocation = allocate_fitting(config, context, min_workers(full_config))
    waited_s = time.monotonic() - began
    try:
        for note in allocation.notes:
            observer.note(note)
        if (number := config.cluster.num_workers) < wanted:
            observer.note(f"there is room for {number} of {wanted} workers")
        config = fit_to_allocation(config, allocation)
        text = dump_config(config)
        keep_preprocessing(config, run)
        with run.claim_attempt() as attempt:
            # the mark lets tasks detect a config file that somebody else has replaced
            plan = plan_allocated(config, run, attempt, mode, allocation, [*extra, *config_mark_arguments(text)])
            _write_attempt(run, text, plan)
        for warning in plan.warnings:
            observer.note(f"warning: {warning}")
        if mode == "train":
            if not isinstance(full_config.cluster.workers, int):
                # store the range, so that a resume may use all workers again
                config, text = full_config, dump_config(full_config)
            _write_run(run, config, text, plan, allocation, context.machine.environ)
        write_start(plan, waited_s)
        with run.reader_lock(attempt) if plan.is_reader else contextlib.nullcontext():
            supervisor = Supervisor(plan, allocation, observer, signals=signals, on_start=on_start)
            with recording_failed_start(plan, supervisor, is_new=is_new, earlier=earlier):
                outcome = supervisor.run()
        end_leftover_processes(plan, observer)
        if mode == "train" and outcome.status == "done":
            outcome = _with_failed_export(run, attempt, outcome)
        if mode == "train" and _failed_by_itself(outcome) and earlier.restore(run, attempt):
            observer.note(f"no step was made: restored the earlier {run.config}")
        if mode == "train" and outcome.status == "done":
            run.forget_secrets()
        return AttemptResult(plan, outcome)
    finally:
        allocation.release()


@contextlib.contextmanager
def recording_failed_start(
    plan: LaunchPlan, supervisor: Supervisor, *, is_new: bool, earlier: EarlierState | None = None
) -> Generator[None]:
    """Undo or record an attempt that ends with an error in the block before it has started any task.

    Args:
        is_new: whether the run had no attempt before. Its files are then deleted, unless they include a launcher's log.
        earlier: the state of the run before this attempt; None if the run has neither a config nor an end.
    """
    try:
        yield
    except (UsageError, OSError):
        if plan.is_run and not plan.is_beside and not supervisor.has_started_tasks:
            run = RunDir(plan.run_dir)
            if is_new and not run.launcher_log.exists():
                run.forget_first_attempt()
            else:
                write_end(plan, "failed")
                if earlier is not None:
                    earlier.restore(run, plan.attempt)
        raise


def _write_attempt(run: RunDir, text: str, plan: LaunchPlan) -> None:
    """Write the files of an attempt before anything starts, so that a killed launcher leaves a record of it.

    Args:
        text: the dumped config.
    """
    run.write_json(run.attempt_plan(plan.attempt), plan.to_plain())
    write_atomically(run.attempt_config(plan.attempt), text)
    for task in plan.tasks:
        make_folder(task.files.path)


def _write_run(
    run: RunDir, config: RunConfig, text: str, plan: LaunchPlan, allocation: Allocation, environ: Mapping[str, str]
) -> None:
    """Write the config, secrets, plan and environment of the run.

    Args:
        text: the dumped config.
    """
    # write the secrets first: without them, a resume could not fill in the references of the config
    run.keep_secrets(config.secrets.variables)
    write_atomically(run.config, text)
    run.write_json(run.plan, plan.to_plain())
    gpus = allocation.places[0].gpus
    settings = plan.settings.to_plain()
    environment = describe_environment(gpus, config.folder, run, config.modules_folder, environ, settings)
    run.write_json(run.environment, environment)


def end_leftover_processes(plan: LaunchPlan, observer: Observer) -> None:
    """End the processes that tasks of an attempt have left running on this host, and report them."""
    from distlaunch.agent.leftover_processes import end_leftovers

    tasks = {str(task.task) for task in plan.tasks}
    if ended := end_leftovers(str(plan.run_dir), plan.attempt, tasks):
        observer.note(ended)


def _with_failed_export(run: RunDir, attempt: int, outcome: Outcome) -> Outcome:
    """Return the outcome of a finished training. If an export failed, it has a warning and exit code 3."""
    failed = [event for event in read_events_of(run.events, ExportFailed) if event.attempt == attempt]
    if not failed:
        return outcome
    advice = f"the run is done; once that is fixed, run `distlaunch export {display_path(run.path)}`"
    warnings = tuple(f"the export failed: {event.reason}; {advice}" for event in failed)
    return replace(outcome, exit_code=ExitCode.FAILED, warnings=(*outcome.warnings, *warnings))


def _failed_by_itself(outcome: Outcome) -> bool:
    """Return True if an attempt failed, and no task was killed, lost or frozen from outside."""
    # a killed task proves nothing about the config
    return not outcome.lost and (bool(outcome.problems) or outcome.failure is not None)


def run_evaluator_only(config: RunConfig, run: RunDir, observer: Observer, context: LaunchContext) -> AttemptResult:
    """Run the evaluator task of a TF_CONFIG in the latest attempt of a run that another launcher trains.

    The files that the other launcher writes are left alone.
    """
    allocation = allocate(config, context)
    cluster, here = _cluster(config, allocation)
    places, engine, number = allocation.places, allocation.engine, newest_training(run) or 0
    extra = config_mark_arguments(run.attempt_config(number).read_text(encoding="utf-8"))
    plan = plan_launch(
        config, run, number, "train", cluster, here=here, places=places, extra=extra, engine=engine,
        recorded=run.recorded_settings(),
    )  # fmt: skip
    for task in plan.tasks:
        make_folder(task.files.path)
        task.files.archive_error()
    return AttemptResult(plan, Supervisor(plan, allocation, observer).run())


def checked(result: AttemptResult, locate: Callable[[Iterable[Problem]], list[Problem]]) -> AttemptResult:
    """Return the result. If tasks found mistakes in the config, raise ConfigError with the lines of the config."""
    if result.outcome.problems:
        raise ConfigError(locate(result.outcome.problems))
    return result
