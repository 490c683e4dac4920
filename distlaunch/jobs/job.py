"""The work of the commands: choose the run, lock it, run its attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.cluster.devices import find_gpus
from distlaunch.config.backend import ignored_backend
from distlaunch.config.checks.unused import unused_settings
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.text import is_stream
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.run import RunConfig
from distlaunch.config.run_name import check_name
from distlaunch.config.tf_config import tf_config_cluster
from distlaunch.engines import LEFT_TO_ANOTHER, engine_of, is_left_to_another
from distlaunch.jobs.attempt import AttemptResult, plan_attempt, run_attempt, run_beside
from distlaunch.jobs.has_validation import check_has_validation
from distlaunch.jobs.isolation import isolate
from distlaunch.jobs.list_checkpoint import check_kept
from distlaunch.jobs.restarts import run_job
from distlaunch.plan.train import LaunchPlan, Mode, fit_config, task_run_name
from distlaunch.runs.paths import shown
from distlaunch.runs.report import open_run
from distlaunch.supervise.observer import Observer, ThreadedObserver

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
    """What will be trained, and in which run.

    Attributes:
        run: the run to go on with; None: a new one, called `name`.
        note: what the user should know about the choice.
        warnings: what the user should know about the config.
        finished: `run` has come to its end already.
        beside: another launcher works on `run`, and all that is to be started is its evaluator.
    """

    config: RunConfig
    name: str
    locate: Locate
    run: RunDir | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    finished: bool = False
    beside: bool = False

    @property
    def would_be(self) -> RunDir:
        """The run's directory; for a new run the one that it would get now."""
        return self.run or RunDir.unclaimed(self.config.runs_dir, self.name)


def choose(request: JobRequest, environ: Mapping[str, str]) -> Choice:
    """Decides which run a request is about. Raises ConfigError, UsageError."""
    target = Path(request.target)
    if target.is_dir():
        return _choose_directory(request, RunDir(target), environ)
    config, locate = _load(target, request.overrides, environ)
    if request.makes_run:
        check_name(config, request.name)
    config, warnings = with_argument_paths(config)
    return replace(_choose(request, config, locate, environ), warnings=(*warnings, *_unused(config, locate)))


def _choose(request: JobRequest, config: RunConfig, locate: Locate, environ: Mapping[str, str]) -> Choice:
    target = Path(request.target)
    if request.name is not None:
        config = config.model_copy(update={"name": request.name})
    given = tf_config_cluster(config, environ)
    name = config.name or target.stem
    if given is not None:
        fit_config(config, given[0])
        name = task_run_name(name, *given)
        if given[1].job == "evaluator":
            return _choose_beside(config, name, locate)
    if not request.resume and config.resume != "auto":
        return Choice(config, name, locate)
    from distlaunch.config.resume import has_more_to_do

    found = RunDir.newest(config.runs_dir, name)
    if found is None:
        return Choice(
            config, name, locate, note=f"there is no run called {name} yet: starting it" if request.resume else ""
        )
    if not has_more_to_do(config, found):
        if request.resume:
            note = f"{shown(found.path)} is finished already; more `train.epochs` go on with it"
            return Choice(config, found.name, locate, found, note=note, finished=True)
        return Choice(config, name, locate, note=f"{shown(found.path)} is finished: starting a new run")
    return Choice(config, found.name, locate, found, note=f"resuming {shown(found.path)}")


def _choose_directory(request: JobRequest, run: RunDir, environ: Mapping[str, str]) -> Choice:
    if not run.exists():
        raise UsageError(f"{shown(run.path)}: no run directory (it has no config.yaml), and no config file either")
    if not run.has_config():
        raise UsageError(f"{shown(run.path)} is a run of a script, not of a config; `distlaunch run` starts the script")
    if not request.resume:
        raise UsageError(f"{shown(run.path)} is a run directory: add --resume to resume it, or give a config file")
    if request.name is not None:
        raise UsageError("--name: a run that is resumed keeps its name")
    config, locate, warnings = _load_run(run, request.overrides, environ)
    _check_place(run, config)
    if run.finished() and not request.overrides:
        return Choice(config, run.name, locate, run, note=f"{shown(run.path)} is finished already", finished=True)
    # a submitted job gets its directory before it starts
    word = "resuming" if run.attempts() else "starting"
    found = (*warnings, *_unused(config, locate))
    return Choice(config, run.name, locate, run, note=f"{word} {shown(run.path)}", warnings=found)


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


def _choose_beside(config: RunConfig, name: str, locate: Locate) -> Choice:
    run = RunDir.newest(config.runs_dir, name)
    if run is None or not run.attempts():
        raise UsageError(
            f"TF_CONFIG asks for an evaluator, but there is no run called {name} in {config.runs_dir} yet; "
            "start the chief first, with a runs_dir that both can reach"
        )
    return Choice(config, run.name, locate, run, note=f"evaluating the checkpoints of {shown(run.path)}", beside=True)


@dataclass(frozen=True)
class ClaimedRun:
    """A run that is chosen and claimed; nothing is started yet."""

    choice: Choice
    run: RunDir


def begin(request: JobRequest, observer: Observer, environ: Mapping[str, str]) -> ClaimedRun | None:
    """Chooses the run and claims its directory; None if there is nothing to do. Raises ConfigError, UsageError.

    Raises RunBusyError if another launcher works on it.
    """
    choice = choose(request, environ)
    if choice.run is not None and not (choice.beside or choice.finished):
        # only a look: `execute` takes the lock for good, after the user has seen it
        with choice.run.lock():
            pass  # nobody goes on with a run that is still going on
    is_given = tf_config_cluster(choice.config, environ) is not None
    if not is_given and is_left_to_another(choice.config.engine, environ):
        observer.note(LEFT_TO_ANOTHER)
        return None
    isolate_if_configured(choice.config, environ)
    for warning in () if choice.finished else choice.warnings:
        observer.note(f"warning: {warning}")
    _note_backend(choice.config, observer, environ)
    if choice.note:
        observer.note(choice.note)
    if choice.finished:
        return None
    return ClaimedRun(choice, choice.run or RunDir.claim(choice.config.runs_dir, choice.name))


def _note_backend(config: RunConfig, observer: Observer, environ: Mapping[str, str]) -> None:
    if note := ignored_backend(config.strategy.kind, config.strategy.backend, environ):
        observer.note(note)


def isolate_if_configured(config: RunConfig, environ: Mapping[str, str]) -> None:
    """See `isolate`."""
    if config.cluster.isolate:
        isolate(engine_of(config, environ))


def execute(claimed: ClaimedRun, observer: Observer, environ: Mapping[str, str]) -> AttemptResult:
    """Trains a claimed run. Raises as `train` does."""
    choice, run = claimed.choice, claimed.run
    if choice.beside:
        return checked(run_beside(choice.config, run, observer, environ), choice.locate)
    with ThreadedObserver.of(observer) as threaded, run.lock_claim():
        return checked(run_job(choice.config, run, threaded, environ), choice.locate)


def train(request: JobRequest, observer: Observer, environ: Mapping[str, str]) -> AttemptResult | None:
    """Runs a config or goes on with a run; None if the run is finished already.

    Raises:
        ConfigError: the config is wrong, be it that a worker found out.
        UsageError: the request cannot be fulfilled.
    """
    claimed = begin(request, observer, environ)
    return None if claimed is None else execute(claimed, observer, environ)


def plan(request: JobRequest, environ: Mapping[str, str]) -> tuple[LaunchPlan, Choice]:
    """What `train` would start, without touching anything."""
    choice = choose(request, environ)
    run = choice.would_be
    attempt = run.attempts()[-1] if choice.beside else run.next_attempt()
    return plan_attempt(choice.config, run, attempt, environ), choice


def use_run(
    path: str,
    mode: Mode,
    overrides: Sequence[str],
    extra: Sequence[str],
    observer: Observer,
    environ: Mapping[str, str],
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
    config, locate, warnings = _load_run(run, overrides, environ)
    for warning in warnings:
        observer.note(f"warning: {warning}")
    _note_backend(config, observer, environ)
    if not overrides and list(extra[:2]) == ["--split", "validation"]:
        check_has_validation(run, config, mode)
    if config.strategy.has_coordinator:  # one device reads the same checkpoint, and needs no servers
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
    if config.engine.kind == "slurm" and "SLURM_JOB_ID" not in environ:  # of a submitted job: a login node is enough
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "local"})})
    isolate_if_configured(config, environ)
    with ThreadedObserver.of(observer) as threaded, run.lock():
        return checked(run_attempt(config, run, mode, threaded, environ, extra=extra), locate)


def checked(result: AttemptResult, locate: Locate) -> AttemptResult:
    """The result, unless the tasks found mistakes in the config: then raises ConfigError with their lines."""
    if result.outcome.problems:
        raise ConfigError(locate(result.outcome.problems))
    return result


def _load(path: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[RunConfig, Locate]:
    from distlaunch.config.read.load import load_config

    if not path.exists() and not is_stream(path):
        what = "config file" if path.suffix in (".yaml", ".yml") else "run or config file"
        raise UsageError(f"{path}: there is no such {what}")
    loaded = load_config(path, tuple(overrides), environ=environ, num_gpus=len(find_gpus(environ)))
    return loaded.config, lambda problems: [
        Problem(problem.key, problem.message, problem.source or loaded.source(problem.key)) for problem in problems
    ]


def _load_run(run: RunDir, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[RunConfig, Locate, list[str]]:
    from distlaunch.config.read.load import load_resolved

    config, locate = _load(run.config, overrides, environ) if overrides else (load_resolved(run.config), list)
    folder, launched_in = run.started_from()
    config, warnings = with_argument_paths(config.in_folder(folder), launched_in)
    return config, locate, warnings
