"""Runs one task: builds strategy, data, model and program in order, then trains, evaluates, predicts or exports."""

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
from distlaunch.base.event_files import read_event_sample, read_events_of
from distlaunch.base.events import (
    DataResolved,
    Evaluated,
    Event,
    Exported,
    ExportFailed,
    ModelBuilt,
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
from distlaunch.data.batching import check_not_batched, check_sizes
from distlaunch.data.comparison import compare_data, describe_data, what_changed
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.random_ops import overlap_warnings, random_warnings
from distlaunch.data.seeds import seed_process
from distlaunch.data.source import Split, first_worker, make_splits, open_splits, with_global_batch
from distlaunch.data.splits import unused_settings_of
from distlaunch.patches.keras_global_seed import share_generator
from distlaunch.patches.tensorflow_late import when_imported
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.devices import grow_gpu_memory, unused_gpus
from distlaunch.strategies.factory import create
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.protocol import Logs, Program, Strategy
from distlaunch.strategies.state import State
from distlaunch.training.build import Findings, build_model, can_be_tested, check_formats_of_module, fixed_batch
from distlaunch.training.callbacks import build_callbacks, hints_on_tasks
from distlaunch.training.checks.fixed_batch import check_fixed_batch
from distlaunch.training.checks.labels import explain_label_errors, with_label_checks
from distlaunch.training.checks.on_jax import check_state_on_jax
from distlaunch.training.export.session import CHECKED_ROWS, ExportError, TrainedModel, WrittenExport, export_all
from distlaunch.training.export.writers import rebuild
from distlaunch.training.first_steps.check import NoCheck, Subject, start_check
from distlaunch.training.layer_table import layer_table
from distlaunch.training.loop import LoopEnd, LoopHooks, TrainingLoop
from distlaunch.training.predictions import named_arrays, split_in_order, write_arrays
from distlaunch.training.step_reports import scalars
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.unbuilt_optimizers import build_used_optimizers

SAMPLE_ROWS = 2  # rows to learn the shapes from


@dataclass(eq=False)
class Session:
    """The parts of a run that a task has built, and the actions on them: train, evaluate, predict, export.

    Attributes:
        config: the resolved config, with the actual global batch size of the data.
        preprocessing: applied to the inputs of each batch before the model.
        rows: a few examples that the model can be called with.
        store: the run's checkpoints.
        restorer: restores the values of a checkpoint.
        can_be_tested: whether the model has a loss, or an evaluation step of its own.
        optimizers: settings of the optimizers as they were built.
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
            compiled: folder for compiled programs; None for the run's own.

        Raises:
            ConfigError: data, model and config do not fit each other.
        """
        # first, because everything below may draw random numbers
        seed_process(config)
        when_imported(grow_gpu_memory)
        # before any computation, because it splits the CPU into devices and joins the cluster
        strategy: Strategy = create(config)
        strategy.keep_compiled(compiled or run.compiled)
        process.on_connected()
        notices = _Notices(process.emit, strategy)
        notices.from_chief("warning", share_note(config, strategy.num_replicas))
        notices.from_each_task("warning", unused_gpus(config.strategy.backend))
        if strategy.is_chief:
            notices.from_each_task("warning", *_untested_version_warnings(run, config.strategy.backend))
        config, train, validation, preprocessing = _read_data(config, run, strategy, notices)
        splits = {"train": train} if validation is None else {"train": train, "validation": validation}
        check_not_batched(splits, config.data, None)
        check_sizes(splits, config.data)
        rows = train.first_rows(SAMPLE_ROWS)
        if strategy.is_chief:
            notices.from_each_task("warning", *random_warnings(config.data, train, preprocessing))
        findings = Findings()
        check_input = functools.partial(check_not_batched, splits, config.data)
        model = build_model(config, strategy, rows, findings, check_input, train.first_rows)
        rows = rows if findings.rows is None else findings.rows
        replicas = strategy.num_replicas if config.strategy.has_replicas else 1
        sizes = [split.num_examples for split in splits.values()]
        check_fixed_batch(config, model, replicas, sizes, train.first_rows, findings.warnings.append)
        if not config.strategy.runs_tensorflow:
            check_state_on_jax(model, findings.warnings.append)
        # before the next call of the model, while its layers still hold the losses that they have added
        testable = can_be_tested(model)
        notices.from_each_task("warning", *findings.warnings)
        train = with_label_checks(train, findings.rules)
        validation = None if validation is None else with_label_checks(validation, findings.rules)
        build_used_optimizers(config, strategy, model, rows)
        # before the program is made, because no variable can be added to a traced step
        with strategy.scope():
            if config.strategy.runs_tensorflow:
                share_generator(model)  # on JAX, random numbers need a seed
            on_built(model)  # `verify` adds variables
        optimizers = describe_optimizers(model)
        program = strategy.program(make_steps(config, model, train.first_rows))
        notices.from_each_task("info", *strategy.notes())
        # a read-only run has a link to the checkpoints; messages should show its target
        checkpoints = run.checkpoints.resolve() if run.checkpoints.is_symlink() else run.checkpoints
        store = CheckpointStore(checkpoints, config.checkpoint.keep)
        restorer = Restorer(config, strategy, store, process.emit)
        return cls(config, run, process, strategy, train, validation, preprocessing, model, rows, program, store,
                   restorer, testable, optimizers)  # fmt: skip

    def run_training(self, *, check_exports: bool = True) -> LoopEnd:
        """Train from the newest good checkpoint, or from the beginning, and export what the config asks for."""
        config, strategy, is_chief = self.config, self.strategy, self.strategy.is_chief
        notices = _Notices(self.process.emit, strategy)
        began = self.process.clock()
        start, restored_from = self.restorer.find(archive=True)
        restored = restored_from and Restored(
            step=start.step, epoch=start.epoch, path=str(restored_from), seconds=self.process.clock() - began
        )
        callbacks = build_callbacks(config.train.callbacks, is_chief=is_chief, run=self.run)
        if is_chief:
            tasks = sum(config.strategy.jobs(config.cluster).values()) if config.strategy.in_lockstep else 1
            notices.from_each_task("info", *hints_on_tasks(config.train.callbacks, callbacks, tasks))
        parts_writer = PartsWriter.agree(strategy, self.store)
        # read before this attempt reports its start
        uses_failures = is_chief and config.checkpoint.every is not None
        failures = past_failures(read_event_sample(self.run.events)) if uses_failures else Failures()
        hooks = LoopHooks.of(
            self.process, store=self.store, is_chief=is_chief, parts_writer=parts_writer, failures=failures
        )
        validation = self.validation if self.can_be_tested else None
        if validation is None and self.validation is not None:
            notices.from_each_task(
                "info", "the model is not validated, because it has neither a loss nor a test_step of its own"
            )
        if restored is not None:
            self.process.emit(restored)
        self._report_start(start)
        check = NoCheck() if self.process.files is None else start_check(self._subject(self.process.files), start)
        loop = TrainingLoop(config, self.model, self.program, self.train, validation, callbacks, hooks, check)
        if is_chief:
            self.process.emit(ModelBuilt(layers=layer_table(self.model)))
        if placed := self.program.placement():
            self.process.emit(VariablesPlaced(variables=placed, mesh=self.program.mesh()))
        with explain_label_errors():
            outcome = self.restorer.with_matching_state(lambda: loop.run(start, self.restorer.take_state))
        if outcome.status == "done":
            self._export_trained(outcome.progress.step, checked=check_exports)
        return outcome

    def trained_model(self) -> keras.Model:
        """Return the model with its current values on one device, outside the strategy; every task must call this."""
        return rebuild(self.config, self.program.snapshot(), self.rows)

    def evaluate(self, split: str, step: int | BestName | None) -> None:
        """Evaluate a checkpoint on one split, counting every example once, and report the metrics."""
        logs = self.evaluate_checkpoint(split, step)
        if logs is not None:
            self.process.emit(Evaluated(step=self.restorer.restored_step, split=split, logs=logs))

    def evaluate_checkpoint(self, split: str, step: int | BestName | None) -> Logs | None:
        """Return the metrics of a checkpoint on one split, counting every example once; None if asked to stop."""
        self.restorer.restore(self.program, step)
        # the whole split, even if training validates on a part of it only
        data, steps = split_in_order(self.config, split, self.train, self.validation, "evaluate on")
        if not self.can_be_tested:
            raise ConfigError(Problem(("compile",), "evaluation needs a loss, or a model with its own test_step"))
        with explain_label_errors():
            logs = self.program.evaluate(data.evaluation_source(), steps, self.process.should_stop)
        return None if logs is None else scalars(logs)

    def predict(self, split: str, step: int | BestName | None, output: Path | None) -> None:
        """Write the predictions for one split, each example once and in order; the chief writes.

        Args:
            step: step of the checkpoint to predict with.
            output: the file; None for one below the run directory.
        """
        self.restorer.restore(self.program, step)
        data, steps = split_in_order(self.config, split, self.train, self.validation, "predict")
        predictions = self.program.predict(data.evaluation_source(steps), self.process.should_stop)
        if predictions is None:
            return
        if self.strategy.is_chief:
            path = output or self.run.predictions(split, self.restorer.restored_step)
            arrays = named_arrays(predictions)
            write_arrays(path, arrays)
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            self.process.emit(Predicted(step=self.restorer.restored_step, split=split, path=str(path), shapes=shapes))
        self.program.agree(Vote())  # the other tasks wait until the file is written

    def export_checkpoint(self, formats: Sequence[ExportFormat], step: int | BestName | None) -> None:
        """Export the model of a checkpoint.

        Args:
            formats: if empty, the config's formats are used, or if it has none, one that suits the model.

        Raises:
            ConfigError: the model does not support a format; nothing is written.
        """
        is_module = isinstance(self.model, ModuleModel)
        formats = formats or self.config.export or ["saved_model" if is_module else "keras"]
        if is_module:
            check_formats_of_module(formats)
        self.restorer.restore(self.program, step)
        state = self.program.snapshot()  # in all tasks, because each may hold parts of it
        if self.strategy.is_chief:
            with self.process.saving():
                self._write_exports(state, formats, self.restorer.restored_step, checked=True)
        self.program.agree(Vote())

    def _export_trained(self, step: int, *, checked: bool) -> None:
        """Export the current model in the config's formats; the chief writes, and the other tasks wait.

        An error is reported and not raised, because the training itself has succeeded.
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
                except Exception as error:  # the user's code builds the model again, and may raise any error
                    known = isinstance(error, DistlaunchError)
                    reason = str(error) if known else f"{type(error).__name__}: {error}{user_line(error)}"
                    self.process.emit(ExportFailed(step=step, reason=reason))
        self.program.agree(Vote())

    def _subject(self, files: Path) -> Subject:
        """Return the description of this attempt that the comparison with one device needs."""
        return Subject(
            self.config, self.strategy, self.program, self.model, self.train, self.validation, files, self.run.events,
            self.optimizers, self.process.emit, self.process.saving, self.process.on_meeting, self.process.forked,
        )  # fmt: skip

    def _lock_exports(self, stack: ExitStack) -> None:
        """Hold the locks of the config's formats until the stack is closed; `distlaunch export` may hold some.

        Raises:
            RunBusyError: another process has held one of the locks for too long, or until a stop was requested.
        """

        def report(message: str) -> None:
            self.process.emit(Notice(level="info", message=message))

        def gives_up(waited_s: float) -> bool:
            limit_s = self.config.cluster.stall_timeout_s
            return self.process.should_stop() or (limit_s is not None and waited_s >= limit_s)

        for kind in sorted(self.config.export):
            lock = lock_when_free(self.run.export_lock(kind), f"the run's export as {kind}", report, gives_up)
            stack.enter_context(lock)

    def _write_exports(self, state: State, formats: Sequence[ExportFormat], step: int, *, checked: bool) -> None:
        original = self.train.first_rows(fixed_batch(self.model) or CHECKED_ROWS, raw=True)
        rows = original if self.preprocessing is None else self.preprocessing(original)
        x = keras.utils.unpack_x_y_sample_weight(original)[0]
        try:
            trained = TrainedModel(self.config, state, rows, x, self.preprocessing, self._input_sizes(formats))
            self._report_exports(export_all(trained, self.run.export, formats, checked=checked), step)
        except ExportError as error:
            self._report_exports(error.written, step)
            raise

    def _input_sizes(self, formats: Sequence[ExportFormat]) -> Any:
        """Return `TrainedModel.sizes` for a model that does not declare its inputs, if a format needs them."""
        if getattr(self.model, "inputs", None) or not {"saved_model", "tflite"} & {*formats}:
            return None
        spec = self.train.batch_spec()
        return None if spec is None else keras.utils.unpack_x_y_sample_weight(spec)[0]

    def _report_exports(self, exports: list[WrittenExport], step: int) -> None:
        for written in exports:
            path, signature = str(written.path), written.signature
            self.process.emit(Exported(format=written.format, path=path, signature=signature, step=step))
            for note in written.notes:
                self.process.emit(Notice(level="warning", message=note))

    def leave(self) -> None:
        """Leave the cluster, when no other task needs this one any longer. A task that has failed does not call it."""
        self.strategy.leave()

    def _report_start(self, start: Progress) -> None:
        config = self.config
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
                # on a resume the learning rate may differ, and is reported separately
                optimizer=optimizers_text(self.optimizers, with_rates=not start.step),
                loss=loss_text(getattr(self.model, "loss", None)),
            )
        )


class _Notices:
    """Reports notices, from the chief alone or from each task."""

    def __init__(self, emit: Callable[[Event], None], strategy: Strategy) -> None:
        self.emit, self._strategy = emit, strategy

    def from_chief(self, level: Literal["info", "warning"], *messages: str) -> None:
        """Report messages that all tasks have, from the chief only; empty ones are skipped."""
        if self._strategy.is_chief:
            self.from_each_task(level, *messages)

    def from_each_task(self, level: Literal["info", "warning"], *messages: str) -> None:
        for message in filter(None, messages):
            self.emit(Notice(level=level, message=message))


def _untested_version_warnings(run: RunDir, backend: Backend) -> list[str]:
    """Return warnings about untested versions, without those that the run's events already have."""
    warnings = untested(frameworks(backend))
    if not warnings:
        return []
    reported = {event.message for event in read_events_of(run.events, Notice)}
    return [warning for warning in warnings if warning not in reported]


def _read_data(config: RunConfig, run: RunDir, strategy: Strategy, notices: _Notices
               ) -> tuple[RunConfig, Split, Split | None, Preprocessing | None]:  # fmt: skip
    """Read the data, and compare it with the data of the other processes and of the previous attempt.

    Returns:
        The config with the actual global batch size, the two splits, and the preprocessing.
    """
    context = first_worker(config)
    share = strategy.share() if config.data.gives_context else Share()
    on_host = not config.strategy.runs_tensorflow
    splits, train, validation = open_splits(config, run, share, context, on_host=on_host)
    if strategy.is_chief:
        notices.from_each_task("warning", *overlap_warnings(splits), *unused_settings_of(config, splits))
    given = with_global_batch(config, train)
    if given.cluster.hosting == "in_process":
        from distlaunch.strategies.parameter_server.numbered_batches import offer_splits

        offer_splits(given, splits, *make_splits(splits, given, on_host=True), context)
    train, validation = compare_data(given, strategy, train, validation, notices.emit)
    both = [train] if validation is None else [train, validation]
    read_by_all = sorted({split.reads_all for split in both if split.reads_all})
    if read_by_all and sum(given.strategy.jobs(given.cluster).values()) > 1:
        why = "each process reads all batches, because their examples cannot be read separately"
        notices.from_chief("info", f"{joined(read_by_all)}: {why}")
    notices.from_chief("info", *dict.fromkeys(note for split in both for note in split.notes))
    examples = {"train": train.num_examples}
    if validation is not None:
        examples["validation"] = validation.num_examples
    name = given.data.tfds.name if given.data.tfds else str(given.data.function)
    seen = describe_data(given, train, validation)
    found = DataResolved(name=name, source=splits.origin, examples=examples, seen=seen)
    if strategy.is_chief:
        notices.from_each_task("warning", what_changed(read_events_of(run.events, DataResolved), found))
    notices.emit(found)
    if given is not config:  # the global batch size was unknown before
        notices.from_chief("warning", share_note(given, strategy.num_replicas))
    return given, train, validation, splits.preprocessing
