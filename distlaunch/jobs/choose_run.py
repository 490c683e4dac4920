"""Decides which run a request is about: a new run, one to resume, or a finished one whose exports are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.run_dir import Identity, RunDir
from distlaunch.base.run_files.ownership import check_ownership
from distlaunch.cluster.machine import Machine
from distlaunch.config.checks.unused import unused_settings
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.scalars import Unfilled
from distlaunch.config.read.text import is_stream
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.run import RunConfig
from distlaunch.config.user_settings import trusted_folders
from distlaunch.engines.context import LaunchContext
from distlaunch.plan.train import Mode, fit_config, task_run_name
from distlaunch.runs.paths import RUNS_DIR, display_path

if TYPE_CHECKING:
    from distlaunch.config.resume import RemainingWork

Locate = Callable[[Iterable[Problem]], list[Problem]]


@dataclass(frozen=True)
class JobRequest:
    """A request to train.

    Attributes:
        target: a config file, or the directory of a run to resume.
        makes_run_dir: whether the command makes a run directory, which needs a valid name.
        metrics_port: the address at which the run's state can be scraped, `PORT` or `HOST:PORT`.
        metrics_file: the text file with the run's state.
    """

    target: str
    overrides: tuple[str, ...] = ()
    name: str | None = None
    resume: bool = False
    makes_run_dir: bool = True
    metrics_port: str | None = None
    metrics_file: str | None = None


@dataclass(frozen=True)
class Choice:
    """The config to train, its launch context and its run.

    Attributes:
        locate: adds the file and line of the config to problems.
        context: the machine and engine on which tasks are started.
        run: the run to resume; None for a new run called `name`.
        note: a message to the user about the choice of the run.
        warnings: messages to the user about the config.
        finished: True if `run` has finished and nothing is left to do.
        evaluator_only: True if another launcher trains `run` and this one only starts its evaluator.
        missing_outputs: exports and evaluations that a finished `run` lacks, as modes and arguments of tasks. They are
            made instead of training.
    """

    config: RunConfig
    name: str
    locate: Locate
    context: LaunchContext
    run: RunDir | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    finished: bool = False
    evaluator_only: bool = False
    missing_outputs: tuple[tuple[Mode, tuple[str, ...]], ...] = ()

    @property
    def target_run_dir(self) -> RunDir:
        """Return the target run directory. For a new run, it is not claimed yet."""
        return self.run or RunDir.unclaimed(self.config.runs_dir, self.name)


def choose(request: JobRequest, machine: Machine) -> Choice:
    """Decide which run a request is about."""
    target = Path(request.target)
    if target.is_dir():
        return _choose_directory(request, RunDir(target), machine)
    config, locate = _load_for(request, machine)
    if request.makes_run_dir:
        config.check_name(request.name)
    config, warnings = with_argument_paths(config)
    choice = _config_for_missing_outputs(_choose(request, config, locate, machine))
    return replace(choice, warnings=(*warnings, *_warn_of_unused_settings(config, locate, machine)))


def _load_for(request: JobRequest, machine: Machine) -> tuple[RunConfig, Locate]:
    """Load the config of a request. Take the values of unset secret variables from the run to resume."""
    target = Path(request.target)
    try:
        return _load(target, request.overrides, machine)
    except ConfigError:
        kept: Mapping[str, str] = _kept_secrets(request, machine) if target.is_file() else {}
        if not kept.keys() - machine.environ.keys():
            raise
        return _load(target, request.overrides, machine, {**kept, **machine.environ})


def _kept_secrets(request: JobRequest, machine: Machine) -> Mapping[str, str]:
    """Return the secrets stored by the run that the request would resume."""
    from distlaunch.config.resume import find_run

    try:
        config, _ = _load(Path(request.target), request.overrides, machine, Unfilled(machine.environ))
    except ConfigError:  # the config is wrong even without the secrets
        return {}
    name = request.name or config.name or Path(request.target).stem
    found = find_run(config.runs_dir, name, machine.environ) if request.resume or config.resume == "auto" else None
    return {} if found is None else found.run.secrets()


def _choose(request: JobRequest, config: RunConfig, locate: Locate, machine: Machine) -> Choice:
    target = Path(request.target)
    if request.name is not None:
        config = config.model_copy(update={"name": request.name})
    context = LaunchContext.resolve(config, machine)
    name = chief_run_name = config.name or target.stem
    if context.given is not None:
        fit_config(config, context.given[0])
        name = task_run_name(name, *context.given)
        if context.given[1].job == "evaluator":
            return _choose_beside(Choice(config, name, locate, context))
    choice = Choice(config, name, locate, context)
    if not request.resume and config.resume != "auto":
        return choice
    return _choose_resumed(request, choice, chief_run_name)


def _choose_resumed(request: JobRequest, new: Choice, chief_run_name: str) -> Choice:
    """Choose what `--resume` does with the runs of a name.

    Args:
        new: the run that this launcher starts if there is none to resume. It may be for a single task of a cluster.
        chief_run_name: the name of the chief's run. If that run can be found, it decides for all tasks.
    """
    from distlaunch.config.resume import check_project, find_run

    config, name, environ = new.config, new.name, new.context.machine.environ
    notes = list[str]()
    found = find_run(config.runs_dir, chief_run_name, environ, notes.append)
    if found is None and name != chief_run_name:
        found = find_run(config.runs_dir, name, environ, notes.append)
    if found is None:
        whose = " of yours" if notes else ""
        notes += [f"there is no run{whose} called {name} yet: starting it"] if request.resume else []
        return replace(new, note="; ".join(notes))
    check_project(config, found.run)
    new_run_hint = "leave out --resume" if request.resume else "add `--set resume=never`"
    remaining = _remaining_work(config, found.run, new_run_hint) if found.finished else None
    if remaining is None:
        _check_epochs(config, found.run, new.locate)
    identity = found.run.identity()
    if name != chief_run_name and identity is not None and identity.name == chief_run_name:
        return _choose_like_chief(new, found.run, identity.number, remaining)
    note = "; ".join([*notes, f"resuming {display_path(found.run.path)}"])
    if found.newer is not None:
        run, newer = display_path(found.run.path), display_path(found.newer.path)
        note += (
            f", which is unfinished; {newer} is newer and finished: use `train {newer} --resume` for that run; "
            f"rename or remove {run} to ignore it"
        )
    note = "; ".join([note, *_list_changes(config, found.run, remaining)])
    return _choose_existing(replace(new, name=found.run.name, run=found.run, note=note), remaining)


def _choose_like_chief(new: Choice, chief: RunDir, number: int, remaining: RemainingWork | None) -> Choice:
    """Choose the run of a single task so that it matches the run of the chief, which another launcher starts."""
    if remaining is not None and not remaining.training:
        note = (
            f"{display_path(chief.path)}, the run of the chief, has finished; to train longer, increase `train.epochs`"
        )
        return replace(new, run=chief, note=note, finished=True)
    task_run = RunDir(Path(new.config.runs_dir) / Identity(new.name, number).folder)
    if task_run.identity() != Identity(new.name, number) or not task_run.has_config():
        return new  # the directory only holds logs, or belongs to another run
    return replace(new, name=task_run.name, run=task_run, note=f"resuming {display_path(task_run.path)}")


def _remaining_work(config: RunConfig, run: RunDir, new_run_hint: str) -> RemainingWork:
    """Return the work that a finished run still lacks. Raise UsageError if the config would give other numbers."""
    from distlaunch.config.resume import remaining_work

    remaining = remaining_work(config, run)
    if remaining.changed:
        where = display_path(run.path)
        raise UsageError(
            f"{where} is finished, and this config would give other numbers: {', '.join(remaining.changed)}; "
            f"to continue {where} with the new values, increase `train.epochs`; for a new run, {new_run_hint}"
        )
    return remaining


def _check_epochs(config: RunConfig, run: RunDir, locate: Locate) -> None:
    """Raise ConfigError if an unfinished run has trained more epochs than the config asks for."""
    from distlaunch.config.resume import check_epochs

    try:
        check_epochs(config, run)
    except ConfigError as error:
        raise ConfigError(locate(error.problems)) from None


def _list_changes(config: RunConfig, run: RunDir, remaining: RemainingWork | None) -> list[str]:
    """Return a text about the settings of the next training that the run did not have before, or nothing.

    Args:
        remaining: the work that a finished run still lacks; None if the run is unfinished.
    """
    from distlaunch.config.resume import changed_settings

    changed = changed_settings(config, run) if remaining is None or remaining.training else ""
    return [changed] if changed else []


def _choose_existing(existing: Choice, remaining: RemainingWork | None) -> Choice:
    """Choose what to do with an existing run: resume it, make the outputs that it lacks, or nothing.

    Args:
        remaining: the work that a finished run still lacks; None if the run is unfinished.
    """
    if remaining is None or remaining.training or existing.run is None:
        return existing
    missing: list[tuple[Mode, tuple[str, ...]]] = []
    names: list[str] = []
    if remaining.formats:
        missing.append(("export", ("--formats", ",".join(remaining.formats))))
        names.append(f"its export as {' and '.join(remaining.formats)}")
    if remaining.evaluation:
        missing.append(("evaluate", ("--split", "validation")))
        names.append("an evaluation")
    where = display_path(existing.run.path)
    if not missing:
        note = f"{where} has finished, and nothing is left to do; to train longer, increase `train.epochs`"
        return replace(existing, note=note, finished=True)
    note = f"{where} has finished but lacks {' and '.join(names)}: adding that"
    return replace(existing, note=note, missing_outputs=tuple(missing))


def _choose_directory(request: JobRequest, run: RunDir, machine: Machine) -> Choice:
    if not run.exists():
        raise UsageError(
            f"{display_path(run.path)}: expected a config file, or a run directory (this directory has no config.yaml)"
        )
    if not run.has_config():
        raise UsageError(
            f"{display_path(run.path)} is a run of a script, not of a config; `distlaunch run` starts the script"
        )
    if not request.resume:
        raise UsageError(
            f"{display_path(run.path)} is a run directory: add --resume to resume it, or give a config file"
        )
    if request.name is not None:
        raise UsageError("--name: a run that is resumed keeps its name")
    # check the owner before reading anything: another user may have planted a config there
    notes = list(filter(None, [check_ownership(run.path, display_path(run.path), trusted_folders(machine.environ))]))
    config, locate, warnings = load_config_of(run, request.overrides, machine, notes.append)
    _check_name_and_runs_dir(run, config)
    new_run_hint = "give its config file without --resume"
    remaining = _remaining_work(config, run, new_run_hint) if run.finished() else None
    if remaining is None:
        _check_epochs(config, run, locate)
    # a submitted job gets its directory before it starts
    word = "resuming" if run.attempts() else "starting"
    warnings = (*warnings, *_warn_of_unused_settings(config, locate, machine))
    note = "; ".join([f"{word} {display_path(run.path)}", *_list_changes(config, run, remaining), *notes])
    context = LaunchContext.resolve(config, machine)
    existing = Choice(config, run.name, locate, context, run, note=note, warnings=warnings)
    return _config_for_missing_outputs(_choose_existing(existing, remaining))


def _check_name_and_runs_dir(run: RunDir, config: RunConfig) -> None:
    """Raise UsageError if overrides change the name or directory of a run, since a resume cannot move it."""
    from distlaunch.config.read.load import load_resolved

    stored = load_resolved(run.config)
    for key, what in (("name", "its name"), ("runs_dir", "its directory")):
        if (value := getattr(config, key)) not in (getattr(stored, key), run.name if key == "name" else None):
            hint = "leave it out, or give the config file for a new run"
            raise UsageError(f"{key}: got '{value}', but a run that is resumed keeps {what}; {hint}")


def _warn_of_unused_settings(config: RunConfig, locate: Locate, machine: Machine) -> list[str]:
    return [str(each) for each in locate(unused_settings(config, machine))]


def _choose_beside(new: Choice) -> Choice:
    from distlaunch.config.resume import find_run

    found = find_run(new.config.runs_dir, new.name, new.context.machine.environ)
    run = found and found.run
    if run is None or not run.attempts():
        raise UsageError(
            f"TF_CONFIG asks for an evaluator, but there is no run called {new.name} in {new.config.runs_dir} yet; "
            "start the chief first, with a runs_dir that both can reach"
        )
    note = f"evaluating the checkpoints of {display_path(run.path)}"
    return replace(new, name=run.name, run=run, note=note, evaluator_only=True)


def _config_for_missing_outputs(choice: Choice) -> Choice:
    """Adapt the config of a choice if outputs are to be made instead of training."""
    if not choice.missing_outputs:
        return choice
    context = choice.context
    machine, config = context.machine, config_for_use(choice.config, context.machine)
    if context.given is not None:  # one device of the chief is enough
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
        machine = machine.without_variables(["TF_CONFIG"])
    return replace(choice, config=config, context=LaunchContext.resolve(config, machine))


def config_for_use(config: RunConfig, machine: Machine) -> RunConfig:
    """Return the config for evaluating, predicting with or exporting the model of a run.

    One device can use the same checkpoint without parameter servers, and without the hosts of the run.
    """
    engine = config.engine.for_one_device(machine.environ)
    is_without_hosts = engine.is_here and not config.engine.is_here
    if config.strategy.has_coordinator or is_without_hosts:
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
    return config.model_copy(update={"engine": engine})


def _load(
    path: Path, overrides: Sequence[str], machine: Machine, variables: Mapping[str, str] | None = None
) -> tuple[RunConfig, Locate]:
    """Load a config file.

    Args:
        variables: values for `${NAME}` in the config; None for the environment variables.
    """
    from distlaunch.config.read.load import load_config

    if not path.exists() and not is_stream(path):
        what = "config file" if path.suffix in (".yaml", ".yml") else "run or config file"
        run = RunDir(Path(RUNS_DIR) / path)
        hint = f"; did you mean {display_path(run.path)}?" if run.exists() else ""
        raise UsageError(f"{path}: there is no such {what}{hint}")
    environ = machine.environ if variables is None else variables
    loaded = load_config(path, tuple(overrides), environ=environ, num_gpus=len(machine.gpus))
    return loaded.config, loaded.located


def load_config_of(
    run: RunDir, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]
) -> tuple[RunConfig, Locate, list[str]]:
    """Load the config of a run, which may have been moved. Raise ConfigError, also if its code is not found.

    Args:
        note: called with a message if the run has been moved.
    """
    from distlaunch.config.read.load_run import load_run

    found = load_run(run, overrides, machine)
    if found.note:
        note(found.note)
    return found.config, found.loaded.located, found.warnings
