"""`train --smoke`: tests a config in about a minute: a few steps, a resume from the checkpoint, and an export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlaunch.base.errors import UsageError, naming_run
from distlaunch.base.event_files import read_events
from distlaunch.base.events import DataResolved, EpochEnded, Event, Notice, StepsDone
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.cluster.machine import Machine
from distlaunch.config.checks.unused import changed
from distlaunch.config.run import RunConfig
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, checked, run_attempt
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.jobs.restarts import note_hosts
from distlaunch.runs.paths import display_path
from distlaunch.supervise.observer import Observer, ThreadedObserver

STEPS = 4
"""Maximum number of steps of a smoke run; small data gives fewer. A checkpoint is written after two steps."""


@dataclass(frozen=True)
class Proof:
    """A statement that a smoke run tests, and whether it is true."""

    statement: str
    holds: bool


@dataclass(frozen=True)
class SmokeResult:
    """The last attempt of a smoke run, and the results of the tests."""

    last: AttemptResult
    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        return all(proof.holds for proof in self.proofs)


def smoke_overrides(config: RunConfig, *, epochs: int) -> tuple[str, ...]:
    """Return the overrides that shorten any run to a few steps. The last batch is a partial one, where possible."""
    batch = config.data.global_batch
    # if the data function makes the batches or no process has all examples, only the number of steps can be limited
    if config.data.batched or batch is None or config.data.gives_context:
        slice_of_data = (f"train.steps_per_epoch={STEPS}",)
    else:
        examples = STEPS * batch - (batch // 2 if config.data.remainder == "keep" else 0)
        # limit a given number of steps as well: an epoch would pass over the few examples again and again
        given = config.train.steps_per_epoch
        # at least two steps, since the checkpoint is written after two
        steps = "null" if given is None else max(2, min(given, STEPS))
        slice_of_data = (f"data.train_examples={examples}", f"train.steps_per_epoch={steps}")
    validation = ("validation.steps=2", "validation.every_epochs=1") if config.validation is not None else ()
    checkpoint = ("checkpoint.every_steps=2", "checkpoint.every_epochs=1")
    # the strategy names a format that can be written quickly for every model
    export = ("export=[]",) if epochs == 1 else () if config.export else (f"export=[{config.strategy.quick_export}]",)
    return (f"train.epochs={epochs}", "resume=never", *slice_of_data, *validation, *checkpoint, *export)


class _SmokeObserver(ThreadedObserver):
    """Hides warnings about settings that come from the smoke run and not from the user.

    Args:
        overridden_keys: the config keys of these settings.
    """

    def __init__(self, observer: Observer, overridden_keys: Sequence[str]) -> None:
        super().__init__(observer)
        self._hidden_prefixes = tuple(f"{key}: " for key in overridden_keys)

    def event(self, event: Event) -> None:
        if not (isinstance(event, Notice) and event.message.startswith(self._hidden_prefixes)):
            super().event(event)


def smoke(request: JobRequest, observer: Observer, machine: Machine) -> SmokeResult:
    """Run the two attempts of a smoke run. See `train` for errors."""
    if (given := RunDir(request.target)).exists():
        raise UsageError(
            f"{display_path(given.path)} is a run: --smoke tests a config; give the config file of the run"
        )
    # a config with `resume: auto` must also start a new run here
    fresh = replace(request, overrides=(*request.overrides, "resume=never"), resume=False)
    choice = choose(fresh, machine)
    config, context = choice.config, choice.context
    isolate_if_configured(config, context)
    name = f"{request.name or config.name}-smoke"
    run = RunDir.claim(config.runs_dir, name)
    validation = config.validation
    overridden_keys = [
        f"validation.{key}" for key in ("steps", "every_epochs") if validation and not changed(validation, key)
    ]
    smoke_observer = _SmokeObserver(observer, overridden_keys)
    with naming_run(display_path(run.path)), smoke_observer as threaded, run.lock_claim(), context.engine as engine:
        note_hosts(engine, threaded.note)
        title = f"smoke test of {request.target}, part"
        threaded.note(f"{title} 1 of 2: a few steps with a checkpoint")
        result = _attempt(request, config, name, 1, run, threaded, context)
        if result.outcome.status == "done":
            threaded.note(f"{title} 2 of 2: resume from the checkpoint, validation, export")
            result = _attempt(request, config, name, 2, run, threaded, context)
    result = replace(result, resumable=False)
    return SmokeResult(result, prove(config, read_events(run.events), [str(task.task) for task in result.plan.tasks]))


def _attempt(
    request: JobRequest,
    config: RunConfig,
    name: str,
    epochs: int,
    run: RunDir,
    observer: Observer,
    context: LaunchContext,
) -> AttemptResult:
    overrides = (*request.overrides, *smoke_overrides(config, epochs=epochs))
    choice = choose(replace(request, name=name, overrides=overrides, resume=False), context.machine)
    # checking an export takes seconds: skip the check if the config does not ask for the export
    extra = () if config.export else ("--unchecked",)
    return checked(run_attempt(choice.config, run, "train", observer, context, extra=extra), choice.locate)


def _has_validation_data(events: Sequence[Event]) -> bool:
    """Return False if the data function returned no validation data."""
    found = [event for event in events if isinstance(event, DataResolved)]
    return not found or any("validation" in {**event.examples, **event.seen} for event in found)


def prove(config: RunConfig, events: Sequence[Event], tasks: Sequence[str]) -> tuple[Proof, ...]:
    """Return the statements that a smoke run tests, and whether they hold, judged by the events of the two attempts."""
    first, second = (RunFacts.of(event for event in events if event.attempt == number) for number in (0, 1))
    losses = [
        event.logs["loss"] for event in events if isinstance(event, StepsDone | EpochEnded) and "loss" in event.logs
    ]
    saved = [event.step for event in first.checkpoints]
    trained, first_step = first.now.step, second.start.first_step if second.start else 0
    replicas = f" for {count(first.start.replicas, 'replica')}" if first.start else ""
    resumed = 0 < first_step < second.now.step
    proofs = [
        Proof("the config is valid", True),
        Proof(f"{count(len(tasks), 'task')} came up", bool(first.now.hosts)),
        Proof("model and data were built" + replicas, first.start is not None),
        Proof("training ran" + (f" ({count(trained, 'step')})" if trained else ""), bool(first.epochs)),
        Proof("the loss is a finite number", bool(losses) and all(math.isfinite(loss) for loss in losses)),
        Proof("a checkpoint was written" + (f" (step {max(saved)})" if saved else ""), bool(saved)),
        Proof("the run was resumed" + (f" from step {first_step}" if resumed else ""), resumed),
    ]
    if config.validation is not None and _has_validation_data(events):
        validated = any(name.startswith("val_") for event in second.epochs for name in event.logs)
        proofs.append(Proof("validation ran", validated))
    formats = second.exports
    proofs.append(Proof("the model was exported" + (f" ({', '.join(formats)})" if formats else ""), bool(formats)))
    return tuple(proofs)
