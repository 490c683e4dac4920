"""One task's part in a run: sets everything up in the right order, then trains, evaluates or exports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import keras

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
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.base.run_files.run_lock import lock_when_free
from distlaunch.base.user_lines import user_line
from distlaunch.cluster.spec import Task
from distlaunch.config.checks.strategy import share_note
from distlaunch.config.run import ExportFormat, RunConfig
from distlaunch.data.batches import Share
from distlaunch.data.batching import check_not_batched
from distlaunch.data.comparison import compared, described, what_changed
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.random_ops import overlap_warnings, random_warnings
from distlaunch.data.seeds import seed_process
from distlaunch.data.source import Split, first_worker, open_splits, with_global_batch
from distlaunch.data.unused_settings import unused_settings_of
from distlaunch.strategies.devices import grow_gpu_memory
from distlaunch.strategies.factory import create
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.parameter_server.numbered_batches import offer_splits
from distlaunch.strategies.protocol import Logs, State, Strategy, Vote
from distlaunch.training.build import Findings, build_model, can_be_tested, check_formats_of_module, fixed_batch
from distlaunch.training.callbacks.keras_callbacks import build_callbacks, hints_on_tasks
from distlaunch.training.checkpoints.files import CheckpointStore
from distlaunch.training.checkpoints.interval import Failures, past_failures
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checkpoints.optimizer_changes import describe_optimizers, loss_text, optimizers_text
from distlaunch.training.checkpoints.restorer import Restorer
from distlaunch.training.checkpoints.writers import PartsWriter
from distlaunch.training.checks.fixed_batch import check_fixed_batch
from distlaunch.training.checks.labels import label_errors_explained, with_rules
from distlaunch.training.checks.versions import new_warnings
from distlaunch.training.export.session import CHECKED_ROWS, ExportError, Trained, Written, export_all
from distlaunch.training.export.writers import rebuild
from distlaunch.training.loop import LoopEnd, TrainingLoop
from distlaunch.training.predictions import in_order, named_arrays, write_arrays
from distlaunch.training.step_reports import scalars
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.surroundings import Surroundings
from distlaunch.training.unbuilt_optimizers import build_used_optimizers

SAMPLE_ROWS = 2  # rows to learn the shapes from


class Session:
    """Holds what a task has built.

    Args:
        config: the resolved config.
        run: the run directory.
        task: which task this process is.
        emit: where events go.
        should_stop: whether this process was asked to stop.
        on_connected: called when all processes have found each other; TensorFlow has set its signal handlers by then.
        on_step, on_meeting, saving, writing, is_stopping: as of `Surroundings`.
        compiled: where compiled programs are kept; None: in the run.
        on_built: called with the model under the strategy's scope, before its steps are made.
    """

    def __init__(self, config: RunConfig, run: RunDir, task: Task, emit: Callable[[Event], None],
                 should_stop: Callable[[], bool], on_connected: Callable[[], None] = lambda: None,
                 on_built: Callable[[keras.Model], None] = lambda model: None,
                 on_step: Callable[[int], None] = lambda step: None,
                 on_meeting: Callable[[], None] = lambda: None,
                 saving: Callable[[], AbstractContextManager[None]] = nullcontext,
                 writing: Callable[[], AbstractContextManager[None]] = nullcontext,
                 is_stopping: Callable[[], bool] = lambda: False,
                 compiled: Path | None = None) -> None:  # fmt: skip
        self._config, self._run, self._emit, self._should_stop = config, run, emit, should_stop
        self._on_step, self._on_meeting, self._saving, self._writing = on_step, on_meeting, saving, writing
        self._is_stopping = is_stopping
        # first: everything below may draw
        seed_process(config)
        grow_gpu_memory()
        # before anything computes: it splits the CPU into devices, and joins the cluster
        self.strategy: Strategy = create(config, task)
        self.strategy.keep_compiled(compiled or run.compiled)
        on_connected()
        self._report_shares()
        for warning in new_warnings(run, config.strategy.backend) if self.strategy.is_chief else ():
            emit(Notice(level="warning", message=warning))
        self.train, self.validation, self._preprocessing = self._read_data()
        if config.data.global_batch is None:
            self._config = config = with_global_batch(config, self.train)
            self._report_shares()
        self._check_not_batched(None)
        rows = self.train.first_rows(SAMPLE_ROWS)
        for warning in random_warnings(config.data, self.train) if self.strategy.is_chief else ():
            emit(Notice(level="warning", message=warning))
        findings = Findings()
        self.model = build_model(config, self.strategy, rows, findings, self._check_not_batched, self.train.first_rows)
        self._rows = rows if findings.rows is None else findings.rows
        splits = [self.train] if self.validation is None else [self.train, self.validation]
        replicas = self.strategy.num_replicas if config.strategy.has_replicas else 1
        sizes = [split.num_examples for split in splits]
        check_fixed_batch(config, self.model, replicas, sizes, self.train.first_rows, findings.warnings.append)
        # now, while the layers still hold the losses that they have added
        self._can_be_tested = can_be_tested(self.model)
        self._heed(findings)
        build_used_optimizers(config, self.strategy, self.model, self._rows)
        with self.strategy.scope():
            # before the program is made: `verify` adds variables, and nothing can after a step is traced
            on_built(self.model)
        self._optimizers = describe_optimizers(self.model)
        self.program = self.strategy.program(make_steps(config, self.model, self.train.first_rows))
        for note in self.strategy.notes():
            emit(Notice(level="info", message=note))
        # of a run that may only be read, it is a link, and its target is what users know
        checkpoints = run.checkpoints.resolve() if run.checkpoints.is_symlink() else run.checkpoints
        self.store = CheckpointStore(checkpoints, config.checkpoint.keep)
        self._restorer = Restorer(config, self.strategy, self.store, emit)

    def run_training(self, *, check_exports: bool = True) -> LoopEnd:
        """Trains from the newest good checkpoint, or from the beginning, and exports what the config asks for."""
        config, is_chief = self._config, self.strategy.is_chief
        start, restored_from = self._restorer.find(archive=True)
        callbacks = build_callbacks(config.train.callbacks, is_chief=is_chief, run=self._run)
        if is_chief:
            tasks = sum(config.strategy.jobs(config.cluster).values()) if config.strategy.in_lockstep else 1
            for hint in hints_on_tasks(config.train.callbacks, callbacks, tasks):
                self._emit(Notice(level="info", message=hint))
        around = Surroundings(
            self._emit, self._should_stop, self.store, is_chief, self._on_step, self._on_meeting, self._saving,
            self._writing, PartsWriter.agree(self.strategy, self.store), self._past_failures(), self._is_stopping,
        )  # fmt: skip
        validation = self.validation if self._can_be_tested else None
        if self.validation is not None and validation is None:
            message = "there is no validation: the model has neither a loss nor a test_step of its own"
            self._emit(Notice(level="info", message=message))
        loop = TrainingLoop(config, self.model, self.program, self.train, validation, callbacks, around)
        self._report_start(start, restored_from)
        if placed := self.program.placement():
            self._emit(VariablesPlaced(variables=placed, mesh=self.program.mesh()))
        with label_errors_explained():
            outcome = self._restorer.with_matching_state(lambda: loop.run(start, self._restorer.take_state))
        if outcome.status == "done":
            self._export_trained(outcome.progress.step, checked=check_exports)
        return outcome

    def trained_model(self) -> keras.Model:
        """The model with its present values on one device, free of the strategy; every task must call it."""
        return rebuild(self._config, self.program.snapshot(), self._rows)

    def evaluate(self, split: str, step: int | BestName | None) -> None:
        """Tells the metrics of a checkpoint on one split, every example counted once."""
        logs = self.evaluate_checkpoint(split, step)
        if logs is not None:
            self._emit(Evaluated(step=self._restorer.restored_step, split=split, logs=logs))

    def evaluate_checkpoint(self, split: str, step: int | BestName | None) -> Logs | None:
        """The metrics of a checkpoint on one split, every example counted once; None if asked to stop."""
        self._restorer.restore(self.program, step)
        # all of it, also where training validates on a part only
        data, steps = in_order(self._config, split, self.train, self.validation, "evaluate on")
        if not self._can_be_tested:
            raise ConfigError(Problem(("compile",), "evaluation needs a loss, or a test_step of the model's own"))
        with label_errors_explained():
            logs = self.program.evaluate(data.evaluation_source(), steps, self._should_stop)
        return None if logs is None else scalars(logs)

    def predict(self, split: str, step: int | BestName | None, output: Path | None) -> None:
        """Writes what a checkpoint's model predicts for one split, every example once and in order; the chief does.

        Args:
            output: the file; None: one below the run directory.
        """
        self._restorer.restore(self.program, step)
        data, steps = in_order(self._config, split, self.train, self.validation, "predict")
        predictions = self.program.predict(data.evaluation_source(steps), self._should_stop)
        if predictions is None:
            return
        if self.strategy.is_chief:
            path = output or self._run.predictions(split, self._restorer.restored_step)
            arrays = named_arrays(predictions)
            write_arrays(path, arrays)
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            self._emit(Predicted(step=self._restorer.restored_step, split=split, path=str(path), shapes=shapes))
        self.program.agree(Vote())  # the others wait until it is written

    def export_checkpoint(self, formats: Sequence[ExportFormat], step: int | BestName | None) -> None:
        """Writes the model of a checkpoint. Raises ConfigError, before it writes, for formats that it cannot have.

        Args:
            formats: empty: those of the config; where it has none, what the model allows.
        """
        is_module = isinstance(self.model, ModuleModel)
        formats = formats or self._config.export or ["saved_model" if is_module else "keras"]
        if is_module:
            check_formats_of_module(formats)
        self._restorer.restore(self.program, step)
        state = self.program.snapshot()  # by all: each may hold parts of it
        if self.strategy.is_chief:
            with self._saving():
                self._write_exports(state, formats, self._restorer.restored_step, checked=True)
        self.program.agree(Vote())

    def _export_trained(self, step: int, *, checked: bool) -> None:
        """Write the formats of the config, of the model as it is; the chief does, the others wait for it.

        Whatever keeps it from being exported, it has been trained.
        """
        if not self._config.export:
            return
        state = self.program.snapshot()
        if self.strategy.is_chief:
            with self._saving():
                try:
                    with ExitStack() as stack:
                        self._lock_exports(stack)
                        self._write_exports(state, self._config.export, step, checked=checked)
                except Exception as error:  # of many kinds: the user's code makes the model again
                    known = isinstance(error, DistlaunchError)
                    reason = str(error) if known else f"{type(error).__name__}: {error}{user_line(error)}"
                    self._emit(ExportFailed(step=step, reason=reason))
        self.program.agree(Vote())

    def _lock_exports(self, stack: ExitStack) -> None:
        """Hold the locks of the config's formats until the stack is left; `distlaunch export` may hold some.

        Raises:
            RunBusyError: another process has held one for too long.
        """

        def say(message: str) -> None:
            self._emit(Notice(level="info", message=message))

        def gives_up(waited_s: float) -> bool:
            limit_s = self._config.cluster.stall_timeout_s
            return self._should_stop() or (limit_s is not None and waited_s >= limit_s)

        for kind in sorted(self._config.export):
            lock = lock_when_free(self._run.export_lock(kind), f"the run's export as {kind}", say, gives_up)
            stack.enter_context(lock)

    def _write_exports(self, state: State, formats: Sequence[ExportFormat], step: int, *, checked: bool) -> None:
        raw = self.train.first_rows(fixed_batch(self.model) or CHECKED_ROWS, raw=True)
        rows = raw if self._preprocessing is None else self._preprocessing(raw)
        x = keras.utils.unpack_x_y_sample_weight(raw)[0]
        try:
            trained = Trained(self._config, state, rows, x, self._preprocessing)
            self._report_exports(export_all(trained, self._run.export, formats, checked=checked), step)
        except ExportError as error:
            self._report_exports(error.written, step)
            raise

    def _report_exports(self, exports: list[Written], step: int) -> None:
        for written in exports:
            path, signature = str(written.path), written.signature
            self._emit(Exported(format=written.format, path=path, signature=signature, step=step))
            for note in written.notes:
                self._emit(Notice(level="warning", message=note))

    def leave(self) -> None:
        """The last call of a task that has not failed: no other task needs it afterwards."""
        self.strategy.leave()

    # set-up

    def _read_data(self) -> tuple[Split, Split | None, Preprocessing | None]:
        config = self._config
        context = first_worker(config)
        splits, train, validation = open_splits(config, self._run, self._share(), context)
        for warning in (
            [*overlap_warnings(splits), *unused_settings_of(config, splits)] if self.strategy.is_chief else ()
        ):
            self._emit(Notice(level="warning", message=warning))
        config = with_global_batch(config, train)
        if config.cluster.hosting == "in_process":
            offer_splits(config, splits, train, validation, context)
        train, validation = compared(config, self.strategy, train, validation, self._emit)
        read_by_all = sorted(
            {split.reads_all for split in (train, validation) if split is not None and split.reads_all}
        )
        if read_by_all and self.strategy.is_chief and sum(config.strategy.jobs(config.cluster).values()) > 1:
            message = (
                f"{joined(read_by_all)}: each process reads all batches, since their examples cannot be read alone"
            )
            self._emit(Notice(level="info", message=message))
        given = [train] if validation is None else [train, validation]
        for note in dict.fromkeys(note for split in given for note in split.notes) if self.strategy.is_chief else ():
            self._emit(Notice(level="info", message=note))
        examples = {"train": train.num_examples}
        if validation is not None:
            examples["validation"] = validation.num_examples
        name = config.data.tfds.name if config.data.tfds else str(config.data.function)
        seen = described(config, train, validation)
        found = DataResolved(name=name, source=splits.origin, examples=examples, seen=seen)
        if self.strategy.is_chief and (changed := what_changed(read_events_of(self._run.events, DataResolved), found)):
            self._emit(Notice(level="warning", message=changed))
        self._emit(found)
        return train, validation, splits.preprocessing

    def _check_not_batched(self, model: keras.Model | None) -> None:
        splits = {"train": self.train, "validation": self.validation}
        given = {name: split for name, split in splits.items() if split is not None}
        check_not_batched(given, self._config.data, model)

    def _share(self) -> Share:
        return self.strategy.share() if self._config.data.gives_context else Share()

    def _heed(self, findings: Findings) -> None:
        """Says what may be wrong with the model, and looks after the labels."""
        for warning in findings.warnings:
            self._emit(Notice(level="warning", message=warning))
        self.train = with_rules(self.train, findings.rules)
        if self.validation is not None:
            self.validation = with_rules(self.validation, findings.rules)

    def _report_shares(self) -> None:
        """On the devices that are really there."""
        note = share_note(self._config, self.strategy.num_replicas)
        if note and self.strategy.is_chief:
            self._emit(Notice(level="warning", message=note))

    def _past_failures(self) -> Failures:
        if self._config.checkpoint.every is None or not self.strategy.is_chief:
            return Failures()
        return past_failures(read_events(self._run.events))  # before this attempt has reported that it trains

    def _report_start(self, start: Progress, restored_from: Path | None) -> None:
        config = self._config
        if restored_from is not None:
            self._emit(Restored(step=start.step, epoch=start.epoch, path=str(restored_from)))
        steps = config.train.steps_per_epoch or self.train.num_batches
        self._emit(
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
                optimizer=optimizers_text(self._optimizers, with_rates=not start.step),
                loss=loss_text(getattr(self.model, "loss", None)),
            )
        )
