"""One attempt of a run: its files are written, its plan is made and executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distlaunch.base.events import StepsDone, read_events
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.config.cluster import Span
from distlaunch.config.run import RunConfig
from distlaunch.engines import ENGINES
from distlaunch.jobs.environment import describe_environment
from distlaunch.plan.train import LaunchPlan, Mode, fit_config, plan_launch
from distlaunch.supervise.event_facts import last_end, tell_end_again
from distlaunch.supervise.observer import Observer
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.signals import SignalPipe


@dataclass(frozen=True)
class AttemptResult:
    """What was executed, and how it ended."""

    plan: LaunchPlan
    outcome: Outcome


def plan_attempt(config: RunConfig, run: RunDir, attempt: int, environ: Mapping[str, str], engine: str) -> LaunchPlan:
    """The plan of a training attempt; reserves and writes nothing."""
    place = ENGINES[engine].find(config, environ, dry=True)
    config = fit_config(config, place.cluster)
    return plan_launch(config, run, attempt, "train", place.cluster, here=place.here, gpus=place.gpus)


def run_attempt(
    config: RunConfig,
    run: RunDir,
    mode: Mode,
    observer: Observer,
    environ: Mapping[str, str],
    *,
    engine: str = "local",
    extra: Sequence[str] = (),
    signals: SignalPipe | None = None,
    workers: int | None = None,
) -> AttemptResult:
    """Runs the next attempt of a run, whose lock the caller holds, and who may have taken signals over already.

    Args:
        workers: how many this attempt has, of a config that gives a span.
    """
    from distlaunch.config.read.load import dump_config

    before: str | None = None
    end = last_end(run) if run.finished() else None
    whole, config = config, config.with_workers(workers or config.cluster.num_workers)
    place = ENGINES[engine].find(config, environ)
    try:
        config = fit_config(config, place.cluster)
        attempt = run.next_attempt()
        plan = plan_launch(config, run, attempt, mode, place.cluster, here=place.here, gpus=place.gpus, extra=extra)
        run.write_json(run.attempt_plan(attempt), plan.to_plain())
        write_atomically(run.attempt_config(attempt), dump_config(config))
        if mode == "train":
            # a run that is resumed may have all of its workers again
            kept = dump_config(whole if isinstance(whole.cluster.workers, Span) else config)
            if attempt and run.config.exists() and (text := run.config.read_text()) != kept:
                before = text
            write_atomically(run.config, kept)
            run.write_json(run.plan, plan.to_plain())
            run.write_json(run.environment, describe_environment(place.gpus))
        for task in plan.tasks:
            task.files.path.mkdir(parents=True, exist_ok=True)
        outcome = ENGINES[engine].execute(plan, place, observer, signals)
        if before is not None and _was_in_vain(run, attempt, outcome):
            # it would stand in the way of every later resume
            write_atomically(run.config, before)
            observer.note(f"no step was made: {run.config} is what it was before")
        if mode == "train" and end is not None and _was_in_vain(run, attempt, outcome):
            tell_end_again(run, end)
        return AttemptResult(plan, outcome)
    finally:
        place.release()


def _was_in_vain(run: RunDir, attempt: int, outcome: Outcome) -> bool:
    """Whether an attempt has failed by itself before its first step."""
    if outcome.lost or not (outcome.problems or outcome.failure is not None):
        return False
    return not any(isinstance(event, StepsDone) and event.attempt == attempt for event in read_events(run.events))


def run_beside(
    config: RunConfig, run: RunDir, observer: Observer, environ: Mapping[str, str], *, engine: str = "local"
) -> AttemptResult:
    """Runs the evaluator that TF_CONFIG asks for, in the latest attempt of a run that another launcher works on.

    Nothing of the run's own is written.
    """
    place = ENGINES[engine].find(config, environ)
    plan = plan_launch(config, run, run.attempts()[-1], "train", place.cluster, here=place.here, gpus=place.gpus)
    for task in plan.tasks:
        task.files.path.mkdir(parents=True, exist_ok=True)
        task.files.set_error_aside()
    return AttemptResult(plan, ENGINES[engine].execute(plan, place, observer, None))
