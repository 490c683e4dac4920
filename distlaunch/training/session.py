"""One task's part in a run: sets everything up in the right order, then trains, evaluates or exports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import keras

from distlaunch.base.code_origins import user_line
from distlaunch.base.compat import frameworks, untested
from distlaunch.base.errors import ConfigError, DistlaunchError, Problem
from distlaunch.base.event_files import read_events, read_events_of
from distlaunch.base.events import (
    DataResolved,
    Evaluated,
    Event,
    Exported,
    ExportFailed,
    Notice,
    Predicted,
    Restored,
    TrainingStarted,
    VariablesPlaced,
)
from distlaunch.base.plural import joined
from distlaunch.base.process import Process
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.base.run_files.run_lock import lock_when_free
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.optimizer_changes import describe_optimizers, loss_text, optimizers_text
from distlaunch.checkpoints.policy import Failures, past_failures
from distlaunch.checkpoints.restorer import Restorer
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.checkpoints.writers import PartsWriter
from distlaunch.cluster.spec import Task
from distlaunch.config.backend import Backend
from distlaunch.config.checks.strategy import share_note
from distlaunch.config.run import ExportFormat, RunConfig
from distlaunch.data.batches import Batch, Share
from distlaunch.data.batching import check_not_batched
from distlaunch.data.comparison import compared, described, what_changed
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.random_ops import overlap_warnings, random_warnings
from distlaunch.data.seeds import seed_process
from distlaunch.data.source import Split, first_worker, open_splits, with_global_batch
from distlaunch.data.splits import unused_settings_of
from distlaunch.strategies.devices import grow_gpu_memory
from distlaunch.strategies.factory import create
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.parameter_server.numbered_batches import offer_splits
from distlaunch.strategies.protocol import Logs, Program, Strategy, Vote
from distlaunch.strategies.state import State
from distlaunch.training.build import Findings, build_model, can_be_tested, check_formats_of_module, fixed_batch
from distlaunch.training.callbacks import build_callbacks, hints_on_tasks
from distlaunch.training.checks.fixed_batch import check_fixed_batch
from distlaunch.training.checks.labels import label_errors_explained, with_rules
from distlaunch.training.export.session import CHECKED_ROWS, ExportError, Trained, Written, export_all
from distlaunch.training.export.writers import rebuild
from distlaunch.training.loop import LoopEnd, Surroundings, TrainingLoop
from distlaunch.training.predictions import in_order, named_arrays, write_arrays
from distlaunch.training.step_reports import scalars
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.unbuilt_optimizers import build_used_optimizers

SAMPLE_ROWS = 2  # rows to learn the shapes from


@dataclass(eq=False)
class Session:
    """What a task has built of a run, and what can be done with it: train, evaluate, predict, export.

    Attributes:
        config: the resolved config, with the global batch that the data have.
        preprocessing: what the inputs of each batch go through before the model.
        rows: a few examples, which the model can be called with.
        store: the run's checkpoints.
        restorer: brings the values of a checkpoint back.
        can_be_tested: there is something to evaluate: a loss, or an evaluation step of the model's own.
        optimizers: their settings, as they were built.
    """

    config: RunConfig
    run: RunDir
    process: Process
    strategy: Strategy
    train: Split
    validation: Split | None
    preprocessing: Preprocessing | None
    model: keras.Model
    rows: Batch
    program: Program
    store: CheckpointStore
    restorer: Restorer
    can_be_tested: bool
    optimizers: list[Any]

    @classmethod
    def build(cls, config: RunConfig, run: RunDir, task: Task, process: Process, *,
              on_built: Callable[[keras.Model], None] = lambda model: None,
              compiled: Path | None = None) -> Self:  # fmt: skip
        """Build a task's part of a run, in the order that the frameworks need; every task calls it.

        Args:
            on_built: called with the model under the strategy's scope, before its steps are made.
            compiled: where compiled programs are kept; None: in the run.

        Raises:
            ConfigError: data, model and config do not fit each other.
        """
        # first: everything below may draw
        seed_process(config)
        grow_gpu_memory()
        # before anything computes: it splits the CPU into devices, and joins the cluster
        strategy: Strategy = create(config, task)
        strategy.keep_compiled(compiled or run.compiled)
        process.on_connected()
        tell = _Notices(process.emit, strategy)
        tell.chief("warning", share_note(config, strategy.num_replicas))
        if strategy.is_chief:
            tell.all("warning", *_new_warnings(run, config.strategy.backend))
        config, train, validation, preprocessing = _read_data(config, run, strategy, tell)
        splits = {"train": train} if validation is None else {"train": train, "validation": validation}
        check_not_batched(splits, config.data, None)
        rows = train.first_rows(SAMPLE_ROWS)
        if strategy.is_chief:
            tell.all("warning", *random_warnings(config.data, train))
        findings = Findings()
        fits = functools.partial(check_not_batched, splits, config.data)
        model = build_model(config, strategy, rows, findings, fits, train.first_rows)
        rows = rows if findings.rows is None else findings.rows
        replicas = strategy.num_replicas if config.strategy.has_replicas else 1
        sizes = [split.num_examples for split in splits.values()]
        check_fixed_batch(config, model, replicas, sizes, train.first_rows, findings.warnings.append)
        # now, while the layers still hold the losses that they have added
        testable = can_be_tested(model)
        tell.all("warning", *findings.warnings)
        train = with_rules(train, findings.rules)
        validation = None if validation is None else with_rules(validation, findings.rules)
        build_used_optimizers(config, strategy, model, rows)
        with strategy.scope():
            # before the program is made: `verify` adds variables, and nothing can after a step is traced
            on_built(model)
        optimizers = describe_optimizers(model)
        program = strategy.program(make_steps(config, model, train.first_rows))
        tell.all("info", *strategy.notes())
        # of a run that may only be read, it is a link, and its target is what users know
        checkpoints = run.checkpoints.resolve() if run.checkpoints.is_symlink() else run.checkpoints
        store = CheckpointStore(checkpoints, config.checkpoint.keep)
        restorer = Restorer(config, strategy, store, process.emit)
        return cls(config, run, process, strategy, train, validation, preprocessing, model, rows, program, store,
                   restorer, testable, optimizers)  # fmt: skip

    def run_training(self, *, check_exports: bool = True) -> LoopEnd:
        """Trains from the newest good checkpoint, or from the beginning, and exports what the config asks for."""
        config, strategy, is_chief = self.config, self.strategy, self.strategy.is_chief
        tell = _Notices(self.process.emit, strategy)
        start, restored_from = self.restorer.find(archive=True)
        callbacks = build_callbacks(config.train.callbacks, is_chief=is_chief, run=self.run)
        if is_chief:
            tasks = sum(config.strategy.jobs(config.cluster).values()) if config.strategy.in_lockstep else 1
            tell.all("info", *hints_on_tasks(config.train.callbacks, callbacks, tasks))
        together = PartsWriter.agree(strategy, self.store)
        # before this attempt has reported that it trains
        counts = is_chief and config.checkpoint.every is not None
        failures = past_failures(read_events(self.run.events)) if counts else Failures()
        around = Surroundings.of(
            self.process, store=self.store, is_chief=is_chief, together=together, failures=failures
        )
        validation = self.validation if self.can_be_tested else None
        if validation is None and self.validation is not None:
            tell.all("info", "there is no validation: the model has neither a loss nor a test_step of its own")
        loop = TrainingLoop(config, self.model, self.program, self.train, validation, callbacks, around)
        self._report_start(start, restored_from)
        if placed := self.program.placement():
            self.process.emit(VariablesPlaced(variables=placed, mesh=self.program.mesh()))
        with label_errors_explained():
            outcome = self.restorer.with_matching_state(lambda: loop.run(start, self.restorer.take_state))
        if outcome.status == "done":
            self._export_trained(outcome.progress.step, checked=check_exports)
        return outcome

    def trained_model(self) -> keras.Model:
        """The model with its present values on one device, free of the strategy; every task must call it."""
        return rebuild(self.config, self.program.snapshot(), self.rows)

    def evaluate(self, split: str, step: int | BestName | None) -> None:
        """Tells the metrics of a checkpoint on one split, every example counted once."""
        logs = self.evaluate_checkpoint(split, step)
        if logs is not None:
            self.process.emit(Evaluated(step=self.restorer.restored_step, split=split, logs=logs))

    def evaluate_checkpoint(self, split: str, step: int | BestName | None) -> Logs | None:
        """The metrics of a checkpoint on one split, every example counted once; None if asked to stop."""
        self.restorer.restore(self.program, step)
        # all of it, also where training validates on a part only
        data, steps = in_order(self.config, split, self.train, self.validation, "evaluate on")
        if not self.can_be_tested:
            raise ConfigError(Problem(("compile",), "evaluation needs a loss, or a test_step of the model's own"))
        with label_errors_explained():
            logs = self.program.evaluate(data.evaluation_source(), steps, self.process.should_stop)
        return None if logs is None else scalars(logs)

    def predict(self, split: str, step: int | BestName | None, output: Path | None) -> None:
        """Writes what a checkpoint's model predicts for one split, every example once and in order; the chief does.

        Args:
            output: the file; None: one below the run directory.
        """
        self.restorer.restore(self.program, step)
        data, steps = in_order(self.config, split, self.train, self.validation, "predict")
        predictions = self.program.predict(data.evaluation_source(steps), self.process.should_stop)
        if predictions is None:
            return
        if self.strategy.is_chief:
            path = output or self.run.predictions(split, self.restorer.restored_step)
            arrays = named_arrays(predictions)
            write_arrays(path, arrays)
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            self.process.emit(Predicted(step=self.restorer.restored_step, split=split, path=str(path), shapes=shapes))
        self.program.agree(Vote())  # the others wait until it is written

    def export_checkpoint(self, formats: Sequence[ExportFormat], step: int | BestName | None) -> None:
        """Writes the model of a checkpoint. Raises ConfigError, before it writes, for formats that it cannot have.

        Args:
            formats: empty: those of the config; where it has none, what the model allows.
        """
        is_module = isinstance(self.model, ModuleModel)
        formats = formats or self.config.export or ["saved_model" if is_module else "keras"]
        if is_module:
            check_formats_of_module(formats)
        self.restorer.restore(self.program, step)
        state = self.program.snapshot()  # by all: each may hold parts of it
        if self.strategy.is_chief:
            with self.process.saving():
                self._write_exports(state, formats, self.restorer.restored_step, checked=True)
        self.program.agree(Vote())

    def _export_trained(self, step: int, *, checked: bool) -> None:
        """Write the formats of the config, of the model as it is; the chief does, the others wait for it.

        Whatever keeps it from being exported, it has been trained.
        """
        if not self.config.export:
            return
        state = self.program.snapshot()
        if self.strategy.is_chief:
            with self.process.saving():
                try:
                    with ExitStack() as stack:
                        self._lock_exports(stack)
                        self._write_exports(state, self.config.export, step, checked=checked)
                except Exception as error:  # of many kinds: the user's code makes the model again
                    known = isinstance(error, DistlaunchError)
                    reason = str(error) if known else f"{type(error).__name__}: {error}{user_line(error)}"
                    self.process.emit(ExportFailed(step=step, reason=reason))
        self.program.agree(Vote())

    def _lock_exports(self, stack: ExitStack) -> None:
        """Hold the locks of the config's formats until the stack is left; `distlaunch export` may hold some.

        Raises:
            RunBusyError: another process has held one for too long.
        """

        def say(message: str) -> None:
            self.process.emit(Notice(level="info", message=message))

        def gives_up(waited_s: float) -> bool:
            limit_s = self.config.cluster.stall_timeout_s
            return self.process.should_stop() or (limit_s is not None and waited_s >= limit_s)

        for kind in sorted(self.config.export):
            lock = lock_when_free(self.run.export_lock(kind), f"the run's export as {kind}", say, gives_up)
            stack.enter_context(lock)

    def _write_exports(self, state: State, formats: Sequence[ExportFormat], step: int, *, checked: bool) -> None:
        raw = self.train.first_rows(fixed_batch(self.model) or CHECKED_ROWS, raw=True)
        rows = raw if self.preprocessing is None else self.preprocessing(raw)
        x = keras.utils.unpack_x_y_sample_weight(raw)[0]
        try:
            trained = Trained(self.config, state, rows, x, self.preprocessing)
            self._report_exports(export_all(trained, self.run.export, formats, checked=checked), step)
        except ExportError as error:
            self._report_exports(error.written, step)
            raise

    def _report_exports(self, exports: list[Written], step: int) -> None:
        for written in exports:
            path, signature = str(written.path), written.signature
            self.process.emit(Exported(format=written.format, path=path, signature=signature, step=step))
            for note in written.notes:
                self.process.emit(Notice(level="warning", message=note))

    def leave(self) -> None:
        """The last call of a task that has not failed: no other task needs it afterwards."""
        self.strategy.leave()

    def _report_start(self, start: Progress, restored_from: Path | None) -> None:
        config = self.config
        if restored_from is not None:
            self.process.emit(Restored(step=start.step, epoch=start.epoch, path=str(restored_from)))
        steps = config.train.steps_per_epoch or self.train.num_batches
        self.process.emit(
            TrainingStarted(
                strategy=config.strategy.kind,
                loop=config.train.loop,
                replicas=self.strategy.num_replicas,
                tasks=sum(config.strategy.jobs(config.cluster).values()) or 1,
                global_batch=config.data.batch,
                epochs=config.train.epochs,
                first_epoch=start.epoch,
                first_step=start.step,
                steps_per_epoch=steps,
                parameters=int(self.model.count_params()) if self.model.built else 0,
                # of a checkpoint's learning rate the resume reports, which may be another
                optimizer=optimizers_text(self.optimizers, with_rates=not start.step),
                loss=loss_text(getattr(self.model, "loss", None)),
            )
        )


class _Notices:
    """Tells what is to be said about a run, in the chief alone or in each task."""

    def __init__(self, emit: Callable[[Event], None], strategy: Strategy) -> None:
        self.emit, self._strategy = emit, strategy

    def chief(self, level: Literal["info", "warning"], *messages: str) -> None:
        """Tell what all tasks know; empty messages are none."""
        if self._strategy.is_chief:
            self.all(level, *messages)

    def all(self, level: Literal["info", "warning"], *messages: str) -> None:
        for message in filter(None, messages):
            self.emit(Notice(level=level, message=message))


def _new_warnings(run: RunDir, backend: Backend) -> list[str]:
    """Return warnings of versions that are not tested, without those that the run's events have already."""
    warnings = untested(frameworks(backend))
    if not warnings:
        return []
    reported = {event.message for event in read_events(run.events) if isinstance(event, Notice)}
    return [warning for warning in warnings if warning not in reported]


def _read_data(config: RunConfig, run: RunDir, strategy: Strategy, tell: _Notices
               ) -> tuple[RunConfig, Split, Split | None, Preprocessing | None]:  # fmt: skip
    """Read the data, and compare them with those of the other processes and of the attempt before.

    Returns:
        The config with the global batch of the data, the splits, and the preprocessing.
    """
    context = first_worker(config)
    share = strategy.share() if config.data.gives_context else Share()
    splits, train, validation = open_splits(config, run, share, context)
    if strategy.is_chief:
        tell.all("warning", *overlap_warnings(splits), *unused_settings_of(config, splits))
    given = with_global_batch(config, train)
    if given.cluster.hosting == "in_process":
        offer_splits(given, splits, train, validation, context)
    train, validation = compared(given, strategy, train, validation, tell.emit)
    both = [train] if validation is None else [train, validation]
    read_by_all = sorted({split.reads_all for split in both if split.reads_all})
    if read_by_all and sum(given.strategy.jobs(given.cluster).values()) > 1:
        why = "each process reads all batches, since their examples cannot be read alone"
        tell.chief("info", f"{joined(read_by_all)}: {why}")
    tell.chief("info", *dict.fromkeys(note for split in both for note in split.notes))
    examples = {"train": train.num_examples}
    if validation is not None:
        examples["validation"] = validation.num_examples
    name = given.data.tfds.name if given.data.tfds else str(given.data.function)
    found = DataResolved(name=name, source=splits.origin, examples=examples, seen=described(given, train, validation))
    if strategy.is_chief:
        tell.all("warning", what_changed(read_events_of(run.events, DataResolved), found))
    tell.emit(found)
    if given is not config:  # only now is it known how the devices share a batch
        tell.chief("warning", share_note(given, strategy.num_replicas))
    return given, train, validation, splits.preprocessing
