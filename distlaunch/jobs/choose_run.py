"""The decision which run a request is about: a new run, one to resume, or one whose exports are missing."""

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
from distlaunch.runs.paths import shown

if TYPE_CHECKING:
    from distlaunch.config.resume import Left

Locate = Callable[[Iterable[Problem]], list[Problem]]


@dataclass(frozen=True)
class JobRequest:
    """A request to train.

    Attributes:
        target: a config file, or the directory of a run to resume.
        makes_run: whether a run directory is made, which needs a name.
    """

    target: str
    overrides: tuple[str, ...] = ()
    name: str | None = None
    resume: bool = False
    makes_run: bool = True


@dataclass(frozen=True)
class Choice:
    """The config to train, its launch context and its run.

    Attributes:
        context: where its tasks are started.
        run: the run to resume; None: a new run called `name`.
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
    def target_run_dir(self) -> RunDir:
        """Return the target run directory; for a new run, the one that it would get now."""
        return self.run or RunDir.unclaimed(self.config.runs_dir, self.name)


def choose(request: JobRequest, machine: Machine) -> Choice:
    """Decide which run a request is about."""
    target = Path(request.target)
    if target.is_dir():
        return _choose_directory(request, RunDir(target), machine)
    config, locate = _load_for(request, machine)
    if request.makes_run:
        config.check_name(request.name)
    config, warnings = with_argument_paths(config)
    choice = _for_use(_choose(request, config, locate, machine))
    return replace(choice, warnings=(*warnings, *_unused(config, locate)))


def _load_for(request: JobRequest, machine: Machine) -> tuple[RunConfig, Locate]:
    """Load the config of a request. Secrets of unset variables come from the run, which has kept them."""
    target = Path(request.target)
    try:
        return _load(target, request.overrides, machine)
    except ConfigError:
        kept: Mapping[str, str] = _kept_secrets(request, machine) if target.is_file() else {}
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
    config, locate, warnings = load_config_of(run, request.overrides, machine, notes.append)
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
    """Return the config with which a run is evaluated, predicted from or exported."""
    if config.strategy.has_coordinator:  # one device reads the same checkpoint, and needs no servers
        config = config.model_copy(update={"strategy": config.strategy.on_one_device(), "cluster": Cluster()})
    return config.model_copy(update={"engine": config.engine.for_one_device(machine.environ)})


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


def load_config_of(
    run: RunDir, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]
) -> tuple[RunConfig, Locate, list[str]]:
    """Load the config of a run, which may have been moved. Raises ConfigError, also for code that is not found."""
    from distlaunch.config.read.load_run import load_run

    found = load_run(run, overrides, machine)
    if found.note:
        note(found.note)
    return found.config, list if found.loaded is None else found.loaded.located, found.warnings
