"""The work of the commands: choose the run, lock it, run its attempts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distlaunch.base.errors import ConfigError, Problem, RunBusyError, StopRequested, UsageError, naming_run
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.base.run_files.identity import Identity
from distlaunch.base.run_files.ownership import check_ownership
from distlaunch.base.run_files.run_lock import lock_run, owner_of
from distlaunch.cluster.machine import Machine
from distlaunch.config.backend import ignored_backend
from distlaunch.config.checks.unused import unused_settings
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.scalars import Unfilled
from distlaunch.config.read.text import is_stream
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.run import RunConfig
from distlaunch.config.run_name import check_name
from distlaunch.config.user_settings import trusted_folders
from distlaunch.engines.context import SECONDARY_SRUN_TASK, LaunchContext
from distlaunch.jobs.attempt import AttemptResult, plan_attempt, run_attempt, run_beside
from distlaunch.jobs.has_validation import check_has_validation
from distlaunch.jobs.isolation import isolate
from distlaunch.jobs.job_end import judge_result, judging_errors
from distlaunch.jobs.list_checkpoint import check_kept
from distlaunch.jobs.reading_copy import reading_copy
from distlaunch.jobs.restarts import run_job
from distlaunch.plan.train import LaunchPlan, Mode, fit_config, task_run_name
from distlaunch.runs.paths import shown
from distlaunch.runs.report import newest_training, open_run
from distlaunch.supervise.observer import Observer, ThreadedObserver

if TYPE_CHECKING:
    from distlaunch.config.resume import Left

Locate = Callable[[Iterable[Problem]], list[Problem]]


@dataclass(frozen=True)
class JobRequest:
    """What the user asks to train.

    Attributes:
        target: a config file, or a run directory to go on with.
        makes_run: it leads to a run directory, which needs a name.
    """

    target: str
    overrides: tuple[str, ...] = ()
    name: str | None = None
    resume: bool = False
    makes_run: bool = True


@dataclass(frozen=True)
class Choice:
    """What will be trained, where, and in which run.

    Attributes:
        context: where its tasks are started.
        run: the run to go on with; None: a new one, called `name`.
        note: what the user should know about the choice.
        warnings: what the user should know about the config.
        finished: `run` has come to its end already.
        beside: another launcher works on `run`, and all that is to be started is its evaluator.
        uses: what is to be done with a finished `run` instead of training: modes and arguments of tasks.
    """

    config: RunConfig
    name: str
    locate: Locate
    context: LaunchContext
    run: RunDir | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    finished: bool = False
    beside: bool = False
    uses: tuple[tuple[Mode, tuple[str, ...]], ...] = ()

    @property
    def would_be(self) -> RunDir:
        """The run's directory; for a new run the one that it would get now."""
        return self.run or RunDir.unclaimed(self.config.runs_dir, self.name)


def choose(request: JobRequest, machine: Machine) -> Choice:
    """Decides which run a request is about. Raises ConfigError, UsageError."""
    target = Path(request.target)
    if target.is_dir():
        return _choose_directory(request, RunDir(target), machine)
    config, locate = _load_for(request, machine)
    if request.makes_run:
        check_name(config, request.name)
    config, warnings = with_argument_paths(config)
    choice = _for_use(_choose(request, config, locate, machine))
    return replace(choice, warnings=(*warnings, *_unused(config, locate)))


def _load_for(request: JobRequest, machine: Machine) -> tuple[RunConfig, Locate]:
    """Load the config of a request. Secrets of variables that are not set are those that its run has kept."""
    target = Path(request.target)
    try:
        return _load(target, request.overrides, machine)
    except ConfigError:
        kept = _kept_secrets(request, machine) if target.is_file() else {}
        if not kept.keys() - machine.environ.keys():
            raise
        return _load(target, request.overrides, machine, {**kept, **machine.environ})


def _kept_secrets(request: JobRequest, machine: Machine) -> Mapping[str, str]:
    """Return what the run that a request would resume has kept."""
    from distlaunch.config.resume import find_run

    try:
        config, _ = _load(Path(request.target), request.overrides, machine, Unfilled(machine.environ))
    except ConfigError:  # for another reason
        return {}
    name = request.name or config.name or Path(request.target).stem
    found = find_run(config.runs_dir, name, machine.environ) if request.resume or config.resume == "auto" else None
    return {} if found is None else found.run.secrets()


def _choose(request: JobRequest, config: RunConfig, locate: Locate, machine: Machine) -> Choice:
    target = Path(request.target)
    if request.name is not None:
        config = config.model_copy(update={"name": request.name})
    context = LaunchContext.resolve(config, machine)
    name = name_of_job = config.name or target.stem
    if context.given is not None:
        fit_config(config, context.given[0])
        name = task_run_name(name, *context.given)
        if context.given[1].job == "evaluator":
            return _choose_beside(Choice(config, name, locate, context))
    choice = Choice(config, name, locate, context)
    if not request.resume and config.resume != "auto":
        return choice
    return _choose_resumed(request, choice, name_of_job)


def _choose_resumed(request: JobRequest, new: Choice, name_of_job: str) -> Choice:
    """Choose what `--resume` does with the runs of a name.

    Args:
        new: a new run of this launcher, which may start a single task of a cluster.
        name_of_job: of the chief's run, which decides for all tasks where it can be seen.
    """
    from distlaunch.config.resume import find_run

    config, name, environ = new.config, new.name, new.context.machine.environ
    notes = list[str]()
    found = find_run(config.runs_dir, name_of_job, environ, notes.append)
    if found is None and name != name_of_job:
        found = find_run(config.runs_dir, name, environ, notes.append)
    if found is None:
        whose = " of yours" if notes else ""
        notes += [f"there is no run{whose} called {name} yet: starting it"] if request.resume else []
        return replace(new, note="; ".join(notes))
    way_to_new = "leave out --resume" if request.resume else "add `--set resume=never`"
    left = _whats_left(config, found.run, way_to_new) if found.finished else None
    identity = found.run.identity()
    if name != name_of_job and identity is not None and identity.name == name_of_job:
        return _choose_beside_chief(new, found.run, identity.number, left)
    note = "; ".join([*notes, f"resuming {shown(found.run.path)}"])
    if found.newer is not None:
        run, newer = shown(found.run.path), shown(found.newer.path)
        note += (
            f", which is unfinished; {newer} is newer, and finished: `train {newer} --resume` takes it instead, "
            f"and {run} is left if you rename or remove it"
        )
    return _choice_of(replace(new, name=found.run.name, run=found.run, note=note), left)


def _choose_beside_chief(new: Choice, chief: RunDir, number: int, left: Left | None) -> Choice:
    """Choose the run of a task that another launcher's chief has decided for."""
    if left is not None and not left.training:
        note = f"{shown(chief.path)}, the run of the chief, has finished; to train longer, increase `train.epochs`"
        return replace(new, run=chief, note=note, finished=True)
    own = RunDir(Path(new.config.runs_dir) / Identity(new.name, number).folder)
    if own.identity() != Identity(new.name, number) or not own.has_config():
        return new  # it only holds logs
    return replace(new, name=own.name, run=own, note=f"resuming {shown(own.path)}")


def _whats_left(config: RunConfig, run: RunDir, way_to_new: str) -> Left:
    """Return what is left to do for a finished run. Raises UsageError if the config would give other numbers."""
    from distlaunch.config.resume import what_is_left

    left = what_is_left(config, run)
    if left.changed:
        where = shown(run.path)
        raise UsageError(
            f"{where} is finished, and this config would give other numbers: {', '.join(left.changed)}; "
            f"to go on with {where} and the new values, ask for more `train.epochs`; for a new run, {way_to_new}"
        )
    return left


def _choice_of(going_on: Choice, left: Left | None) -> Choice:
    """Return the choice for a run: to go on, to do what is left for a finished one, or nothing.

    Args:
        left: None: the run is unfinished.
    """
    if left is None or left.training or going_on.run is None:
        return going_on
    uses: list[tuple[Mode, tuple[str, ...]]] = []
    lacks: list[str] = []
    if left.formats:
        uses.append(("export", ("--formats", ",".join(left.formats))))
        lacks.append(f"its export as {' and '.join(left.formats)}")
    if left.evaluation:
        uses.append(("evaluate", ("--split", "validation")))
        lacks.append("an evaluation")
    where = shown(going_on.run.path)
    if not uses:
        note = f"{where} has finished, and nothing is left to do; to train longer, increase `train.epochs`"
        return replace(going_on, note=note, finished=True)
    return replace(
        going_on, note=f"{where} is finished, but lacks {' and '.join(lacks)}: adding that", uses=tuple(uses)
    )


def _choose_directory(request: JobRequest, run: RunDir, machine: Machine) -> Choice:
    if not run.exists():
        raise UsageError(f"{shown(run.path)}: no run directory (it has no config.yaml), and no config file either")
    if not run.has_config():
        raise UsageError(f"{shown(run.path)} is a run of a script, not of a config; `distlaunch run` starts the script")
    if not request.resume:
        raise UsageError(f"{shown(run.path)} is a run directory: add --resume to resume it, or give a config file")
    if request.name is not None:
        raise UsageError("--name: a run that is resumed keeps its name")
    # before anything of it is read: what others have put there is no config of this user's
    notes = list(filter(None, [check_ownership(run.path, shown(run.path), trusted_folders(machine.environ))]))
    config, locate, warnings = _load_run(run, request.overrides, machine, notes.append)
    _check_place(run, config)
    way_to_new = "give its config file without --resume"
    left = _whats_left(config, run, way_to_new) if run.finished() else None
    # a submitted job gets its directory before it starts
    word = "resuming" if run.attempts() else "starting"
    found = (*warnings, *_unused(config, locate))
    note = "; ".join([f"{word} {shown(run.path)}", *notes])
    context = LaunchContext.resolve(config, machine)
    return _for_use(_choice_of(Choice(config, run.name, locate, context, run, note=note, warnings=found), left))


def _check_place(run: RunDir, config: RunConfig) -> None:
    """Raise UsageError if overrides name another place than that of the run, which nothing would move."""
    from distlaunch.config.read.load import load_resolved

    stored = load_resolved(run.config)
    for key, what in (("name", "its name"), ("runs_dir", "its directory")):
        if (value := getattr(config, key)) not in (getattr(stored, key), run.name if key == "name" else None):
            hint = "leave it out, or give the config file for a new run"
            raise UsageError(f"{key}: got '{value}', but a run that is resumed keeps {what}; {hint}")


def _unused(config: RunConfig, locate: Locate) -> list[str]:
    return [str(each) for each in locate(unused_settings(config))]


def _choose_beside(new: Choice) -> Choice:
    from distlaunch.config.resume import find_run

    found = find_run(new.config.runs_dir, new.name, new.context.machine.environ)
    run = found and found.run
    if run is None or not run.attempts():
        raise UsageError(
            f"TF_CONFIG asks for an evaluator, but there is no run called {new.name} in {new.config.runs_dir} yet; "
            "start the chief first, with a runs_dir that both can reach"
        )
    note = f"evaluating the checkpoints of {shown(run.path)}"
    return replace(new, name=run.name, run=run, note=note, beside=True)


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
    """Chooses the run and claims its directory; None if there is nothing to do. Raises ConfigError, UsageError.

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
    _note_backend(choice.config, observer, machine)
    if choice.note:
        observer.note(choice.note)
    if choice.finished:
        if choice.run is not None:
            on_finished(choice.run)
            if not choice.beside:
                choice.run.forget_secrets()  # its launcher was killed before it could
        return None
    return ClaimedRun(choice, choice.run or RunDir.claim(choice.config.runs_dir, choice.name))


def _note_backend(config: RunConfig, observer: Observer, machine: Machine) -> None:
    if note := ignored_backend(config.strategy.kind, config.strategy.backend, machine.environ):
        observer.note(note)


def isolate_if_configured(config: RunConfig, context: LaunchContext) -> None:
    """See `isolate`."""
    if config.cluster.isolate:
        isolate(context.engine)


def execute(claimed: ClaimedRun, observer: Observer) -> AttemptResult:
    """Trains a claimed run. Raises as `train` does."""
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
    """Do what a finished run lacks, and return the last result, or the first of an attempt that did not end well."""
    config, context = choice.config, choice.context
    result: AttemptResult | None = None
    with context.engine:
        for mode, extra in choice.uses:
            if result is None or not result.outcome.exit_code:
                with contextlib.ExitStack() as stack:
                    if mode == "export":
                        _claim_exports(run, config, extra, stack)
                    result = checked(run_attempt(config, run, mode, observer, context, extra=extra), choice.locate)
    assert result is not None, "there is something to do"
    return result


def train(
    request: JobRequest,
    observer: Observer,
    machine: Machine,
    on_run: Callable[[RunDir], None] = lambda run: None,
) -> AttemptResult | None:
    """Runs a config or goes on with a run; None if the run is finished already.

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
    """What `train` would start, without touching anything; None: nothing, since the run is finished."""
    choice = choose(request, machine)
    if choice.finished:
        return None, choice
    run = choice.would_be
    attempt = (newest_training(run) or 0) if choice.beside else run.next_attempt()
    mode, extra = choice.uses[0] if choice.uses else ("train", ())
    return plan_attempt(choice.config, run, attempt, choice.context, mode, extra), choice


def use_run(
    path: str,
    mode: Mode,
    overrides: Sequence[str],
    extra: Sequence[str],
    observer: Observer,
    machine: Machine,
    checkpoint: int | BestName | None = None,
) -> AttemptResult:
    """Starts the processes of an existing run to do something else than training.

    Args:
        checkpoint: the step of the checkpoint to take; `best`: that of the best epoch; None: the newest.
    """
    run = open_run(path)
    if not run.has_config():
        raise UsageError(f"{shown(run.path)} is a run of a script: distlaunch does not know its model")
    if checkpoint is not None:
        check_kept(run, checkpoint)
        extra = [*extra, "--checkpoint", str(checkpoint)]
    config, locate, warnings = _load_run(run, overrides, machine, observer.note)
    for warning in warnings:
        observer.note(f"warning: {warning}")
    _note_backend(config, observer, machine)
    if not overrides and list(extra[:2]) == ["--split", "validation"]:
        check_has_validation(run, config, mode)
    config = config_for_use(config, machine)
    context = LaunchContext.resolve(config, machine)
    isolate_if_configured(config, context)
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming_run(shown(run.path)))
        if mode == "export":
            _claim_exports(run, config, extra, stack)
        place = run.path
        if not run.may_be_written():
            extra = [*extra, *_output_elsewhere(mode, extra)]
            observer.note(f"{shown(run.path)} can only be read: nothing is recorded there")
            run = stack.enter_context(reading_copy(run))
        threaded = stack.enter_context(ThreadedObserver.of(observer))
        stack.enter_context(context.engine)
        try:
            result = checked(run_attempt(config, run, mode, threaded, context, extra=extra), locate)
        except StopRequested as asked:
            # nothing is left to resume, as it is of `train`
            asked.exit_code = 128 + asked.number
            raise
        outcome = replace(result.outcome, exit_code=result.outcome.code_of_command)
        return replace(result, plan=replace(result.plan, run_dir=place), outcome=outcome)


def _claim_exports(run: RunDir, config: RunConfig, extra: Sequence[str], stack: contextlib.ExitStack) -> None:
    """Hold the locks of the formats that are written. Raises UsageError, RunBusyError."""
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise UsageError(f"{shown(run.path)} can only be read: an export is written into the run; copy the run first")
    # without any, the model decides between two
    formats = extra[1].split(",") if extra[:1] == ["--formats"] else config.export or ["keras", "saved_model"]
    for kind in sorted(formats):
        try:
            stack.enter_context(lock_run(run.export_lock(kind)))
        except RunBusyError:
            owner = owner_of(run.export_lock(kind))
            who = owner.description if owner is not None else "another process"
            message = f"{shown(run.path)}: {who} is writing its export as {kind}; wait until it has ended"
            raise RunBusyError(message) from None


def _output_elsewhere(mode: Mode, extra: Sequence[str]) -> list[str]:
    """Return the argument for predictions that cannot be written into the run. Raises UsageError without a place."""
    if mode != "predict" or "--output" in extra:
        return []
    if not os.access(".", os.W_OK | os.X_OK):
        raise UsageError("neither the run nor the current directory can be written to; add --output FILE")
    return ["--output", str(Path(f"predictions-{extra[1]}.npz").absolute())]


def _for_use(choice: Choice) -> Choice:
    """Return a choice whose config fits what is to be done, which may be something else than training."""
    if not choice.uses:
        return choice
    context = choice.context
    machine, config = context.machine, config_for_use(choice.config, context.machine)
    if context.given is not None:  # one device of the chief's does it, and needs no peers
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
        machine = machine.without_variables(["TF_CONFIG"])
    return replace(choice, config=config, context=LaunchContext.resolve(config, machine))


def config_for_use(config: RunConfig, machine: Machine) -> RunConfig:
    """The config with which something else than training is done with a run."""
    if config.strategy.has_coordinator:  # one device reads the same checkpoint, and needs no servers
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
    return config.model_copy(update={"engine": config.engine.for_one_device(machine.environ)})


def checked(result: AttemptResult, locate: Locate) -> AttemptResult:
    """The result, unless the tasks found mistakes in the config: then raises ConfigError with their lines."""
    if result.outcome.problems:
        raise ConfigError(locate(result.outcome.problems))
    return result


def _load(
    path: Path, overrides: Sequence[str], machine: Machine, variables: Mapping[str, str] | None = None
) -> tuple[RunConfig, Locate]:
    """Load a config file.

    Args:
        variables: for `${NAME}`; None: those of the environment.
    """
    from distlaunch.config.read.load import load_config

    if not path.exists() and not is_stream(path):
        what = "config file" if path.suffix in (".yaml", ".yml") else "run or config file"
        raise UsageError(f"{path}: there is no such {what}")
    environ = machine.environ if variables is None else variables
    loaded = load_config(path, tuple(overrides), environ=environ, num_gpus=len(machine.gpus))
    return loaded.config, loaded.located


def _load_run(
    run: RunDir, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]
) -> tuple[RunConfig, Locate, list[str]]:
    """Load the config of a run, which may have been moved. Raises ConfigError, also for code that is not found."""
    from distlaunch.config.read.load_run import load_run

    found = load_run(run, overrides, machine)
    if found.note:
        note(found.note)
    return found.config, list if found.loaded is None else found.loaded.located, found.warnings
