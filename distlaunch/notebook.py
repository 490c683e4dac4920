"""Training inside this process, for notebooks and tests. Everything else works as in `distlaunch train`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import EventWriter, read_events_of
from distlaunch.base.events import (
    CheckpointFailed,
    EpochEnded,
    Event,
    ExampleSkipped,
    ExportFailed,
    Notice,
    Restored,
    RunEnded,
    TaskStarted,
)
from distlaunch.base.report_page import leaving_page
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.base.run_files.earlier_state import EarlierState
from distlaunch.base.run_files.ownership import check_ownership
from distlaunch.base.run_files.run_facts import AttemptFacts
from distlaunch.base.user_modules import add_folder, after_user_code, changed_modules, record_modules
from distlaunch.cluster.environment import describe_environment
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables, settings_in_effect
from distlaunch.cluster.spec import Task
from distlaunch.config.backend import choose_backend
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.load import dump_config, load_config, load_mapping
from distlaunch.config.read.load_run import load_run
from distlaunch.config.read.words import either
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.resume import (
    changed_settings,
    check_epochs,
    check_project,
    find_run,
    keep_preprocessing,
    remaining_work,
)
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies import MODELS, Strategy
from distlaunch.config.user_settings import trusted_folders
from distlaunch.data.function_references import forget_changed_files

if TYPE_CHECKING:
    import keras

    from distlaunch.training.loop import LoopEnd
    from distlaunch.training.session import Session

_TASK = Task("worker", 0)


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Attributes:
        history: values of each epoch, by name, including those of earlier attempts of the run.
        model: the model on one device, without the strategy, with the weights at the end.
        run_dir: the run directory; pass it to `train` to continue the run.
        status: `stopped` if training was interrupted, with a checkpoint.
        export_errors: reasons why exports of the config were not written; empty if all were.
    """

    history: dict[str, list[float]]
    model: keras.Model
    run_dir: Path
    status: Literal["done", "stopped"]
    export_errors: tuple[str, ...] = ()


def train(
    config: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), runs_dir: str | Path | None = None
) -> Result:
    """Train a config or resume a run, and print a line per epoch.

    An interrupt (Ctrl-C, or the notebook's stop button) stops after the current step, with a checkpoint. An export that
    fails is a warning, because the training itself has succeeded; see `Result.export_errors`.

    Args:
        config: a config file, its content as a dict, or a run directory to continue. With `resume: auto`, a config
            continues the newest unfinished run of its name; if that run has finished, its result is returned.
        overrides: `train.epochs=3` and the like.
        runs_dir: the folder for a new run directory, instead of the config's `runs_dir`.

    Raises:
        ConfigError: the config is wrong. The error has all problems that were found.
        DataError: an example cannot be read. The error names it.
        UsageError: the strategy needs separate processes, or more devices than this process has.
    """
    stale = _use_changed_code()
    loaded = notebook_config(config, tuple(overrides))
    if runs_dir is not None:
        loaded = loaded.model_copy(update={"runs_dir": os.path.expanduser(runs_dir)})
    _check_process(loaded, config)
    run = _choose(config, loaded)
    if changed := changed_settings(loaded, run):
        print(f"resuming {_shown(run.path)}; {changed}", flush=True)
    # imported here, because it imports NumPy, which must come after the variables for the hardware are set
    from distlaunch.data.examples.pending_events import take_events
    from distlaunch.data.examples.read_failures import data_errors_raised, forget_failures

    # of an earlier run in this kernel
    forget_failures()
    take_events()
    warnings_at_start = [*stale, *_without_effect(loaded, run)]
    with leaving_page(run, os.environ), run.lock(notebook=True), data_errors_raised():
        session, outcome = train_here(loaded, run, _interrupts(), warnings_at_start)
    history = {name: list(values) for name, values in outcome.progress.history.items()}
    failed = read_events_of(run.events, ExportFailed)
    errors = tuple(event.reason for event in failed if event.attempt == run.attempts()[-1])
    return Result(history, session.trained_model(), run.path, outcome.status, errors)


def _without_effect(config: RunConfig, run: RunDir) -> list[str]:
    """Return a warning about trackers, which only `distlaunch train` starts."""
    if not config.tracking:
        return []
    command = f"distlaunch track {_shown(run.path)}"
    return [f"tracking: a training in a notebook sends nothing to trackers; afterwards, `{command}` sends its values"]


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _use_changed_code() -> list[str]:
    """Let files that were edited since the last training be loaded again, and return warnings about those that are not.

    Only files that a config names by their path are loaded again. Other modules may be in use in the notebook.
    """
    add_folder(Path.cwd())
    record_modules()
    after_user_code(record_modules)
    forget_changed_files()
    changed = [os.path.relpath(file) for file in changed_modules()]
    hint = "this training uses the version that was imported; to use the new one, restart the kernel"
    return [f"{file} has changed since this process imported it; {hint}" for file in changed]


def notebook_config(config: str | Path | Mapping[str, Any], overrides: tuple[str, ...]) -> RunConfig:
    machine = Machine.here()
    num_gpus = len(machine.gpus)
    if isinstance(config, Mapping):
        return load_mapping(config, overrides, num_gpus=num_gpus).config
    path = Path(config)
    if not path.is_dir():
        return _with_argument_paths(load_config(path, overrides, num_gpus=num_gpus).config)
    run = RunDir(path)
    if not run.has_config():
        raise UsageError(f"{path}: expected a config file, or a run directory (this directory has no config.yaml)")
    found = load_run(run, overrides, machine)
    if found.config.modules_folder is not None:
        add_folder(found.config.modules_folder)
    for note in (*found.warnings, *([found.note] if found.note else [])):
        warnings.warn(note, stacklevel=3)
    return found.config


def _with_argument_paths(config: RunConfig) -> RunConfig:
    config, notes = with_argument_paths(config)
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return config


def _check_process(config: RunConfig, given: str | Path | Mapping[str, Any]) -> None:
    strategy, cluster = config.strategy, config.cluster
    if cluster.evaluator:
        raise UsageError("cluster.evaluator: a notebook starts no other process; remove it, or use `distlaunch train`")
    if strategy.processes(cluster):
        raise UsageError(_processes_needed(strategy, cluster))
    wanted = strategy.backend
    # once imported, TensorFlow keeps its settings
    if "tensorflow" not in sys.modules:
        os.environ.update(kept_variables(Machine.here().hardware, _recorded_settings(given, config)))
    # once imported, Keras keeps its backend
    if "keras" not in sys.modules:
        choose_backend(wanted)
    import keras

    if keras.backend.backend() != wanted:
        raise UsageError(
            f"Keras runs on {keras.backend.backend()} in this process, but '{strategy.kind}' needs it on {wanted}; "
            f"set KERAS_BACKEND={wanted} before Keras is imported, in a fresh process (the notebook's kernel)"
        )


def _recorded_settings(given: str | Path | Mapping[str, Any], config: RunConfig) -> dict[str, str]:
    """Return the settings of the run that would be resumed; empty for a new run."""
    if not isinstance(given, Mapping) and Path(given).is_dir():
        return RunDir(given).recorded_settings()
    found = find_run(config.runs_dir, config.name or "run", os.environ) if config.resume == "auto" else None
    return {} if found is None else found.run.recorded_settings()


def _processes_needed(strategy: Strategy, cluster: Cluster) -> str:
    """Return an error message for a config that needs several processes. It names a change that avoids them."""
    otherwise = f"use `distlaunch train` for '{strategy.kind}'"
    if "hosting" in strategy.cluster_keys:
        key, got, change = "cluster.hosting", cluster.hosting, "write `hosting: in_process`"
    elif not strategy.processes(cluster.model_copy(update={"workers": 1})):
        key, got, change = "cluster.workers", cluster.num_workers, "remove it"
    else:
        alone = [kind for kind, model in MODELS.items() if "workers" not in model.cluster_keys]
        key, got, change = "strategy.kind", strategy.kind, f"write `strategy.kind: {either(alone)}`"
    problem = f"{key}: got {got!r}, which needs separate processes, but a notebook is a single process"
    return f"{problem}; {change}, or {otherwise}"


def _choose(given: str | Path | Mapping[str, Any], config: RunConfig) -> RunDir:
    if not isinstance(given, Mapping) and Path(given).is_dir():
        run = RunDir(given)
        if note := check_ownership(run.path, str(given), trusted_folders(os.environ)):
            warnings.warn(note, stacklevel=3)
        _check_settings(config, run, finished=run.finished(), new_run_hint="pass a config instead of this directory")
        return run
    name = config.name or "run"
    found = find_run(config.runs_dir, name, os.environ, warnings.warn) if config.resume == "auto" else None
    if found is None:
        return RunDir.claim(config.runs_dir, name)
    check_project(config, found.run)
    _check_settings(config, found.run, finished=found.finished, new_run_hint="write `resume: never`")
    return found.run


def _check_settings(config: RunConfig, run: RunDir, *, finished: bool, new_run_hint: str) -> None:
    """Raise an error if a run cannot be continued with a config, or is finished and would have other numbers."""
    if not finished:
        check_epochs(config, run)
    elif changed := remaining_work(config, run).changed:
        raise UsageError(
            f"{run.path} is finished, and this config would give other numbers: {', '.join(changed)}; "
            f"to continue it with the new values, increase `train.epochs`; for a new run, {new_run_hint}"
        )


def train_here(
    config: RunConfig,
    run: RunDir,
    interrupts: contextlib.AbstractContextManager[Callable[[], bool]],
    messages: Iterable[str] = (),
) -> tuple[Session, LoopEnd]:
    """Run the next attempt of a run, whose lock the caller holds.

    Args:
        interrupts: yields a function that returns whether to stop after the current step. On exit, it may treat an
            exception as an interrupt.
        messages: warnings that the attempt reports at its start.
    """
    from distlaunch.base.process import Process
    from distlaunch.training.precision import dtype_policy_scope
    from distlaunch.training.session import Session

    attempt, earlier = run.next_attempt(), EarlierState.of(run)
    text = dump_config(config)
    keep_preprocessing(config, run)
    run.keep_secrets(config.secrets.variables)
    write_atomically(run.attempt_config(attempt), text)
    write_atomically(run.config, text)
    settings = settings_in_effect(Machine.here().hardware, run.recorded_settings())
    for warning in settings.warnings:
        print(f"warning: {warning}", flush=True)
    environment = describe_environment([], config.folder, run, config.modules_folder, settings=settings.to_plain())
    run.write_json(run.environment, environment)
    reporter = _Reporter(run, attempt, config.train.epochs)
    began = time.monotonic()
    # a session clears Keras's global state, including the dtype policy, which this scope restores at the end
    with dtype_policy_scope(), contextlib.closing(reporter):
        try:
            with interrupts as should_stop:
                reporter.emit(TaskStarted(host=socket.gethostname(), pid=os.getpid()))
                for message in messages:
                    reporter.emit(Notice(level="warning", message=message))
                process = Process(reporter.emit, should_stop, files=run.task(attempt, str(_TASK)).path)
                session = Session.build(config, run, _TASK, process)
                outcome = session.run_training()
                at, seconds = outcome.progress, time.monotonic() - began
                ended = RunEnded(
                    status=outcome.status, step=at.step, epochs_done=at.epoch, seconds=seconds, logs=outcome.logs
                )
                reporter.emit(ended)
                if outcome.status == "done":
                    run.forget_secrets()
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            reporter.fail(status, time.monotonic() - began)
            # an interrupt proves nothing about the config
            if status == "failed" and earlier.restore(run, attempt):
                print(f"no step was made: restored the earlier {_shown(run.config)}", flush=True)
            raise
    return session, outcome


class _Reporter:
    """Writes the run's events, and prints those that show the progress."""

    def __init__(self, run: RunDir, attempt: int, epochs: int) -> None:
        self._writer = EventWriter(run.events, attempt=attempt, task=str(_TASK))
        self._run, self._epochs = run, epochs
        self._facts = AttemptFacts()
        self.close = self._writer.close

    def emit(self, event: Event) -> None:
        self._writer.write(event)
        self._facts.add(event)
        match event:
            case EpochEnded():
                values = "  ".join(f"{name} {value:.4g}" for name, value in event.logs.items())
                print(f"epoch {event.epoch + 1}/{self._epochs}  {values}", flush=True)
            case Restored():
                print(f"resuming from step {event.step} of {self._run.name}", flush=True)
            case CheckpointFailed():
                print(f"warning: checkpoint of step {event.step}: {event.reason}", flush=True)
            case ExampleSkipped():
                print(f"warning: {event.reason}; it is left out", flush=True)
            case ExportFailed():
                advice = f"the run is done; once that is fixed, run `distlaunch export {_shown(self._run.path)}`"
                print(f"warning: the export failed: {event.reason}; {advice}", flush=True)
            case Notice(level="warning"):
                print(f"warning: {event.message}", flush=True)
            case _:
                pass

    def fail(self, status: str, seconds: float) -> None:
        """Record the end of an attempt that could not report it itself."""
        at = self._facts
        self._writer.write(RunEnded(status=status, step=at.step, epochs_done=at.epochs_done, seconds=seconds))


@contextlib.contextmanager
def _interrupts() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether an interrupt came. A second interrupt ends training at once."""
    asked = threading.Event()
    # Python delivers signals to the main thread, and only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("stopping after the current step; interrupt again to end at once", flush=True)

    # the notebook's own handler is restored below
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
