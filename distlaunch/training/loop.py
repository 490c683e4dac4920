"""The training loop: epochs, graph calls, callbacks, validation, checkpoints. All strategies and both loops share it.

The callbacks' hooks are called in the order of Keras's `fit`. Keras's own `fit` is not used, even where it runs: it
cannot resume within an epoch, fails with several steps per call on replicas, and would be a second implementation that
has to give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import keras
import numpy as np

from distlaunch.base.call_length import steps_in_call
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.events import EpochEnded, Notice
from distlaunch.base.plural import count, listed
from distlaunch.base.process import Process
from distlaunch.checkpoints.best import BestEpoch, mode_warnings
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.optimizer_changes import carry_over, current_rate, describe_optimizers, unchanged_rates
from distlaunch.checkpoints.policy import Failures, Moment, SaveContext, save_decision
from distlaunch.checkpoints.saver import CALLBACK, Saver
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.checkpoints.writers import PartsWriter
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Source
from distlaunch.data.examples.example_times import not_for_training
from distlaunch.data.source import Split
from distlaunch.patches.keras_alone import call_methods_within
from distlaunch.strategies.adapted_layers import adapted_values, changed_layers
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.final_weights import (
    has_final_weights,
    keep_swapped_weights,
    swap_back,
    unused_averages,
)
from distlaunch.strategies.local_model import METHODS
from distlaunch.strategies.protocol import BatchHooks, CallResult, Logs, Program
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import WEIGHTS, overrides_method
from distlaunch.training.callbacks import (
    EPOCH_HOOKS,
    RateWatch,
    TrainableWatch,
    continue_log,
    missing_monitor,
    run_alone,
    save_intervals,
    user_epoch_hooks,
    watch_batches,
    watch_test_batches,
)
from distlaunch.training.checks.nonfinite import NonFinite
from distlaunch.training.first_steps.check import NoCheck
from distlaunch.training.step_reports import StepInterval, StepReports, scalars
from distlaunch.training.step_timer import StepTimer


@dataclass(frozen=True)
class LoopHooks(Process):
    """Hooks of the process that the loop calls, and the run as this process sees it.

    Attributes:
        store: the run's checkpoints.
        failures: failures of the run before this attempt.
        parts_writer: writes checkpoints together with other processes; None if the chief writes them alone.
    """

    store: CheckpointStore = field(kw_only=True)
    is_chief: bool = field(kw_only=True)
    parts_writer: PartsWriter | None = field(default=None, kw_only=True)
    failures: Failures = field(default=Failures(), kw_only=True)

    @classmethod
    def of(cls, process: Process, **run: Any) -> Self:
        """Return the hooks of a process.

        Args:
            run: values of the attributes that `Process` does not have.
        """
        return cls(**{each.name: getattr(process, each.name) for each in fields(process)}, **run)


@dataclass(frozen=True)
class LoopEnd:
    """The end of training.

    Attributes:
        status: `done`, or `stopped` on request, with a checkpoint to resume from.
    """

    status: Literal["done", "stopped"]
    progress: Progress
    logs: Logs


class TrainingLoop:
    """Trains from a given progress to the end, or until it is asked to stop."""

    def __init__(self, config: RunConfig, model: keras.Model, program: Program, train: Split, validation: Split | None,
                 callbacks: list[keras.callbacks.Callback], hooks: LoopHooks,
                 check: NoCheck | None = None) -> None:  # fmt: skip
        self._config, self._model, self._program, self._hooks = config, model, program, hooks
        self._train, self._callbacks = train, callbacks
        self._check = check or NoCheck()
        self._epochs = config.train.epochs
        self._epoch_steps = config.train.steps_per_epoch or train.num_batches
        self._progress, self._first_step = Progress(), 0
        self._extended_epoch: tuple[int, int] | None = None
        """Index of an epoch that is longer than the others, and its number of steps."""
        self._call = CallLength(config.train.steps_per_call, each_batch=watch_batches(callbacks))
        self._best = BestEpoch(config.checkpoint.best)
        self._saves = save_decision(config.checkpoint, hooks.failures, hooks.clock(), [self._best])
        self._reports = StepReports(hooks.emit, config.train.log_every_steps, hooks.clock)
        # no progress bar: the launcher shows one, from events; `verbose` has the default of `fit`
        self._callback_list = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=False, model=model,
            epochs=self._epochs, steps=self._epoch_steps, verbose=1,
        )  # fmt: skip
        keep_swapped_weights(callbacks)
        self._validation = validation
        self._validation_source: Source | None = None
        self._next_steps = 0
        self._has_checked_monitors = self._has_checked_first_epoch = False
        self._trainable = TrainableWatch(model, self._warn, on_mesh=config.strategy.is_functional)
        self._watches_batches: bool | None = None
        """Whether a callback of any task may stop training after a batch; None until this is known."""
        self._ends_after_step = False
        """Whether a callback set `stop_training` before the first step of the epoch, after which Keras's `fit` ends."""
        self._gathering_hooks: set[str] = set()
        """Hooks in which a callback may call the model, so the processes gather the weights before them."""
        self._callback_saves: list[StepInterval] = []
        """Steps after which a Keras callback saves; a graph call must end at each of them."""
        self._nonfinite = NonFinite(config.train.on_nonfinite, hooks.emit if hooks.is_chief else lambda event: None)
        self._saver = Saver(
            config, model, callbacks, hooks, hooks.store, is_chief=hooks.is_chief, best=self._best,
            policy=self._saves, on_nonfinite=self._nonfinite.state, together=hooks.parts_writer,
        )  # fmt: skip
        self._timer = StepTimer(hooks.emit, train, config.data, clock=hooks.clock)
        self._optimizers = describe_optimizers(model)
        """Settings of the new optimizers, before a checkpoint is restored and before a callback changes them."""
        self._rate_watch = RateWatch([], self._warn)

    def run(self, start: Progress, take_state: Callable[[], State] | None = None) -> LoopEnd:
        """Train from `start`; on return, pending checkpoints are committed.

        Args:
            take_state: called once for the checkpoint's values, unless `start` is the beginning.

        Raises:
            CheckpointWriteError: the last checkpoint cannot be written, so that the result would be lost.
        """
        # a callback calls the model in this process only, because other processes might not call it at the same time
        with self._check, self._saver, call_methods_within(self._model, METHODS, self._program.alone):
            end = self._run(start, take_state)
        self._timer.report()  # the steps since the last report
        return end

    def _run(self, start: Progress, take_state: Callable[[], State] | None) -> LoopEnd:
        self._progress = start
        self._extend_epoch(start)
        self._best.check(has_validation=self._validation is not None)
        for warning in mode_warnings(self._config.checkpoint.best):
            self._warn(warning)
        # errors after this line are recorded with a step, which means that a restart may help; see `may_be_temporary`
        self._hooks.on_step(start.step)
        # before the state is restored: some programs trace a step on a batch to learn the names of its logs
        self._program.set_train_data(self._check.recorded(self._source(start), start))
        self._first_step = start.step
        callback_arrays = self._restore(take_state(), start) if start.step > 0 and take_state is not None else {}
        self._progress = replace(start, optimizers=self._optimizers)
        for name in unused_averages(self._model):
            self._warn(
                f"the optimizer '{name}' averages the weights (use_ema), but like Keras's fit, distlaunch uses only "
                "the averages of the compiled optimizer as final weights; to use these too, call the optimizer's "
                "finalize_variable_values in on_train_end"
            )
        self._model.stop_training = start.stop_training
        for callback in self._callbacks if start.step > 0 else ():
            continue_log(callback, start.epoch)
        self._callback_saves = [
            StepInterval(number) for number in self._broadcast_from_chief(save_intervals(self._callbacks))
        ]
        gathering = self._broadcast_from_chief(
            [EPOCH_HOOKS.index(name) + 1 for name in user_epoch_hooks(self._callbacks)]
        )
        if gathering and self._program.is_split:
            self._gathering_hooks = {EPOCH_HOOKS[number - 1] for number in gathering}
            # `call_methods_within` does not cover calls of the model itself
            run_alone(self._callbacks, self._gathering_hooks, self._program.alone)
        self._call_hook("train_begin")
        # after on_train_begin, in which callbacks such as EarlyStopping reset their counters
        self._saver.restore(start, callback_arrays)
        # a finished run that is resumed ends with its previous values
        logs = {name: values[-1] for name, values in start.history.items() if values}
        first = self._progress.epoch
        while self._progress.epoch < self._epochs and not self._progress.finished:
            if self._train.is_process_local and self._epoch_steps is None and self._progress.epoch > first:
                self._program.set_train_data(self._source(self._progress))
            ended = self._epoch()
            if ended is None:
                # waits for the files, because the process ends afterwards
                self._save_if_due(Moment.STOP, otherwise="the run can resume from an older one", wait=True)
                return LoopEnd("stopped", self._progress, scalars(logs))
            logs = ended
        self._end(logs)
        self._check.finish()
        return LoopEnd("done", self._progress, scalars(logs))

    def _end(self, logs: Logs) -> None:
        """Finish the weights as Keras's `fit` does, call the callbacks, and save the result."""
        # `final_weights` is False if a callback has replaced the weights at the end and no step was trained since
        finalizes = has_final_weights(self._model) and self._progress.final_weights is not False
        has_callbacks = bool(self._config.train.callbacks)
        if finalizes:
            swap_back(self._callbacks, self._progress.epoch)
            self._progress = replace(self._progress, final_weights=True)
            self._save_if_due(Moment.END, otherwise=None, wait=True)
            self._program.finalize()
            self._report_averages()
        elif has_callbacks:  # in case a callback fails or changes the weights at the end
            self._save_if_due(Moment.END, wait=True)
        before = self._program.snapshot() if finalizes and has_callbacks else {}
        self._call_hook("train_end", logs)
        self._report_end()
        if finalizes:
            # the checkpoint has the weights of the last step, and is replaced if a callback has set others
            changed = has_callbacks and _weights_differ(before, self._program.snapshot())
            if not (has_callbacks and self._program.agree(Vote(finish=changed)).finish):
                return
            self._progress = replace(self._progress, final_weights=False)
        # after on_train_end, in which EarlyStopping may put the best weights back
        self._save_if_due(Moment.END, otherwise=None, wait=True)

    def _report_averages(self) -> None:
        if self._hooks.is_chief:
            message = (
                "the optimizer has set the model's weights to their averages (use_ema), as at the end of Keras's fit"
            )
            self._hooks.emit(Notice(level="info", message=message))

    def _restore(self, state: State, start: Progress) -> State:
        """Restore the values of a checkpoint, and return the callbacks' values, which are restored later."""
        compiled = self._config.compile
        source = "model.function" if compiled is None or compiled.optimizer is None else "compile.optimizer"
        carried = carry_over(self._model, start.optimizers, self._optimizers, state, source)
        adapted = adapted_values(self._model)
        self._program.restore(carried.state)
        notes = list(carried.notes)
        if changed := changed_layers(adapted, self._model):
            notes.append(
                f"the model's function has adapted {listed(changed)} to other data than in the checkpoint's attempt; "
                "the vocabularies and statistics of the checkpoint are used"
            )
        for note in notes if self._hooks.is_chief else ():
            self._hooks.emit(Notice(level="info", message=note))
        self._rate_watch = RateWatch(carried.new_rates, self._warn)
        self._callback_list.callbacks = list(self._rate_watch.with_rate_checks(self._callback_list.callbacks))
        return {name: value for name, value in state.items() if name.startswith(CALLBACK)}

    def _source(self, start: Progress) -> Any:
        # if only the validation of an epoch is left, start at the next epoch's data
        at = (start.epoch, start.step_in_epoch) if start.pending_logs is None else (start.epoch + 1, 0)
        # 0 if the config now has fewer epochs than were trained
        passes = max(self._epochs - at[0], 0)
        if self._epoch_steps is None:
            # a source of process-local data is a single pass, because the processes must agree on its end
            return self._train.training_source(
                *at, ends_visible=True, passes=min(passes, 1) if self._train.is_process_local else passes
            )
        if self._extended_epoch is not None:
            at = (at[0], self._epoch_steps - 1)
        # counted from the end of training, because past epochs may have had other lengths
        left = self._epoch_steps - at[1] + (passes - 1) * self._epoch_steps if passes else 0
        if self._config.train.steps_per_epoch is None:
            return self._train.training_source(*at, ends_visible=False, batches=left)
        if self._train.num_batches:
            # with `steps_per_epoch`, an epoch is not a pass over the data, which may end within an epoch
            at = divmod(start.step, self._train.num_batches)
            return self._train.training_source(*at, ends_visible=False, batches=left)
        return self._train.training_source(0, 0, ends_visible=False, skip=start.step, batches=left)

    def _extend_epoch(self, start: Progress) -> None:
        """Add one step to an epoch that has all of its steps already, because the new settings made it shorter.

        Without a step, the epoch would have no logs.
        """
        steps = self._epoch_steps
        if steps is None or start.pending_logs is not None or not start.step_in_epoch >= steps:
            return
        self._extended_epoch = start.epoch, start.step_in_epoch + 1
        done = f"epoch {start.epoch + 1} has already run {count(start.step_in_epoch, 'step')}"
        self._warn(f"{done}, but an epoch now has {steps}; the epoch ends after one more step")

    @property
    def _steps_of_epoch(self) -> int | None:
        """Number of steps of the epoch in progress; None if it ends with its data."""
        if self._extended_epoch is not None and self._extended_epoch[0] == self._progress.epoch:
            return self._extended_epoch[1]
        return self._epoch_steps

    def _report_end(self) -> None:
        at = self._progress
        if not self._hooks.is_chief:
            return
        # EarlyStopping restores its best weights even if it did not stop training
        restored = next((each for each in self._callbacks if getattr(each, "restore_best_weights", False)), None)
        best = None if getattr(restored, "best_weights", None) is None else getattr(restored, "best_epoch", 0) + 1
        later = "a resume with more epochs continues from them, like a second call of `fit`"
        if at.epoch < self._epochs and at.finished:
            # `stopped_epoch` of EarlyStopping is not 0 if it has stopped training
            stopper = next((each for each in self._callbacks if getattr(each, "stopped_epoch", 0)), None)
            name = "a callback" if stopper is None else type(stopper).__name__
            details = "" if best is None else f"; the weights are those of epoch {best}"
            if at.step == self._first_step:
                details += "; increase `train.epochs` to continue"
            message = f"{name} ended training after epoch {at.epoch} of {self._epochs}{details}"
            self._hooks.emit(Notice(level="info", message=message))
        elif best is not None and best != at.epoch:
            message = f"{type(restored).__name__} has restored the weights of epoch {best}; {later}"
            self._hooks.emit(Notice(level="info", message=message))

    def _warn(self, message: str) -> None:
        """Report a warning once for all tasks."""
        if self._hooks.is_chief:
            self._hooks.emit(Notice(level="warning", message=message))

    def _call_hook(self, name: str, *arguments: Any) -> None:
        """Call a hook of the callbacks."""
        # a callback may write files for minutes, like ModelCheckpoint, and the task is given time to finish
        with (
            self._hooks.saving(),
            self._program.gathered() if name in self._gathering_hooks else nullcontext(),
            self._trainable.around(name) if self._config.train.callbacks else nullcontext(),
        ):
            getattr(self._callback_list, f"on_{name}")(*arguments)

    # one epoch

    def _epoch(self) -> Logs | None:
        """Run one epoch; return its logs, or None if asked to stop within it."""
        epoch, began = self._progress.epoch, self._hooks.clock()
        self._progress = replace(self._progress, final_weights=None)
        logs = self._progress.pending_logs
        # a callback that multiplies the rate has done so when the epoch began, in an earlier attempt
        has_begun = self._progress.step_in_epoch > 0 or logs is not None
        with unchanged_rates(self._model) if has_begun else nullcontext():
            self._call_hook("epoch_begin", epoch)
        self._ends_after_step = self._is_asked_to_end()
        if logs is None:
            if self._progress.step_in_epoch == 0:
                self._program.reset_metrics()
            logs = self._train_steps()
            if logs is None:
                return None
        validation_logs = self._validate(epoch)
        if validation_logs is None:
            # the epoch's steps are done, so a resume from here starts with the validation
            self._progress = replace(self._progress, pending_logs=scalars(logs))
            return None
        train_logs = logs
        logs = {**logs, **{f"val_{name}": value for name, value in validation_logs.items()}}
        if not self._has_checked_monitors and (validation_logs or self._validation is None):
            self._check_monitors(logs, train_logs)
        reported = scalars(logs)  # taken before the hook: a callback may change the logs
        self._nonfinite.metrics(reported, epoch)
        # before callbacks set the rate of the next epoch
        rate = current_rate(self._model) if self._hooks.is_chief else None
        known = {name: len(values) for name, values in self._model.history.history.items()}
        self._call_hook("epoch_end", epoch, logs)
        # callbacks get a copy of the logs, to which some add values, such as the learning rate
        added = {name: values[-1] for name, values in self._model.history.history.items() if name not in logs
                 and len(values) > known.get(name, 0)}  # fmt: skip
        at = self._save_context(Moment.EPOCH_END, epoch=epoch + 1, logs=reported, is_validated=bool(validation_logs))
        self._finish_epoch(at, {**logs, **scalars(added)}, self._hooks.clock() - began, rate)
        return logs

    def _validate(self, epoch: int) -> Logs | None:
        """Evaluate after an epoch (from 0); return the logs, {} if no evaluation is due, or None if asked to stop."""
        section = self._config.validation
        last = epoch + 1 == self._epochs
        if self._validation is None or section is None or not ((epoch + 1) % section.every_epochs == 0 or last):
            return {}
        self._call_hook("test_begin")
        source = self._validation_source or self._check.recorded_validation(self._validation.evaluation_source())
        self._validation_source = source
        hooks = self._check.around_validation(self._validation_hooks())
        # the time for reading validation data must not count as time for reading training data
        with not_for_training():
            logs = self._program.evaluate(source, section.steps, self._hooks.should_stop, hooks)
        if logs is not None:
            self._call_hook("test_end", logs)
        return logs

    def _validation_hooks(self) -> BatchHooks | None:
        """Return hooks around the validation batches for the callbacks of any task, or None if there are none."""
        # the config is the same in all tasks, so all of them call `agree` or none does
        if not self._config.train.callbacks:
            return None
        mine = watch_test_batches(self._callbacks)
        # with hooks, each batch is a separate graph call, which all tasks must make
        if not self._program.agree(Vote(finish=mine)).finish:
            return None
        return BatchHooks(
            begin=lambda batch: self._call_hook("test_batch_begin", batch),
            end=lambda batch, logs: self._call_hook("test_batch_end", batch, logs),
        )

    def _check_monitors(self, logs: Logs, train_logs: Logs) -> None:
        """Raise ConfigError if a callback watches a value that does not exist; the callback would never do anything."""
        self._has_checked_monitors = True
        problem = missing_monitor(self._config.train.callbacks, self._callbacks, logs)
        if problem is None:
            return
        # saving needs all tasks, but if a user callback runs on the chief only, the other tasks do not see its problem
        if ":" not in self._config.train.callbacks[int(problem.key[2])].name:
            self._progress = replace(self._progress, pending_logs=scalars(train_logs))
            self._save_if_due(Moment.STOP, wait=True)
            problem = problem._replace(
                message=f"{problem.message}; correct it and resume (the epoch's steps are saved)"
            )
        raise ConfigError(problem)

    def _train_steps(self) -> Logs | None:
        logs: Logs = {}
        steps = self._steps_of_epoch
        while steps is None or self._progress.step_in_epoch < steps:
            wanted, is_asked_to_end = self._steps_to_run(), False
            first = self._progress.step_in_epoch
            self._call_hook("train_batch_begin", first)
            began = self._hooks.clock()
            # decided before the call and broadcast with the vote, because all tasks must save after the same step
            asks = self._hooks.is_chief and self._saves.chief_asks(self._save_context(Moment.STEP))
            vote = Vote(self._hooks.should_stop(), bool(self._model.stop_training), self._next_steps, asks)
            self._check.before_step(self._progress)
            self._timer.begin()
            result = self._program.run_steps(wanted, vote)
            self._timer.add(result.times)
            for note in result.notes:
                self._hooks.emit(Notice(level="info", message=note))
            # raises an error of the checkpoint writer's thread now, instead of an epoch later
            self._saver.check()
            if result.nonfinite is not None:
                # `error.json` records this step
                self._hooks.on_step(self._progress.step + result.nonfinite)
                self._nonfinite.step(result, self._progress, restored_step=self._first_step)
            if result.steps:
                logs = result.logs
                self._rate_watch.stop_watching()
                if self._progress.step == self._first_step:
                    self._best.check_names(logs, is_alike=self._reports_same_values())
                self._advance(result, self._hooks.clock() - began)
                self._check.after_step(self._progress, logs)
                self._call_hook("train_batch_end", first + result.steps - 1, logs)
                is_asked_to_end = self._any_watches_batches() and self._is_asked_to_end()
            here, ends = self._progress.step_in_epoch, result.vote.finish or is_asked_to_end
            if ends:
                self._model.stop_training = True  # in all tasks, also for a checkpoint before the end of the epoch
            if here and (ends or (result.ended if steps is None else here == steps)):
                # saved with a checkpoint of this step, because a resume from it has no step left to compute the logs
                self._progress = replace(self._progress, pending_logs=scalars(logs))
            if result.vote.stop:
                return None
            if result.ended:
                self._check_end(result)
                # `logs` is empty if this attempt resumed after the last step of the data
                logs = logs or result.logs
                break
            if ends:
                break
            self._save_if_due(Moment.STEP, chief_asks=result.vote.save)
        return logs

    def _is_asked_to_end(self) -> bool:
        """Return whether a callback of any task has set `stop_training`; every task must call it."""
        # the config is the same in all tasks, so all of them call `agree` or none does
        if not self._config.train.callbacks:
            return False
        return self._program.agree(Vote(finish=bool(self._model.stop_training))).finish

    def _any_watches_batches(self) -> bool:
        """Return whether a callback of any task may stop training after a batch; every task must call it."""
        if self._watches_batches is None:
            ends_on_nan = any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in self._callbacks)
            mine = ends_on_nan or watch_batches(self._callbacks)
            self._watches_batches = bool(self._config.train.callbacks) and self._program.agree(Vote(finish=mine)).finish
        return self._watches_batches

    def _broadcast_from_chief(self, numbers: list[int]) -> list[int]:
        """Return the chief's numbers in every task. They come from callbacks, of which other tasks have only some."""
        if not self._config.train.callbacks:
            return []
        length = self._program.agree(Vote(next_steps=len(numbers) if self._hooks.is_chief else 0)).next_steps
        proposed = numbers if self._hooks.is_chief else [0] * length
        return [self._program.agree(Vote(next_steps=number)).next_steps for number in proposed]

    def _steps_to_run(self) -> int:
        step, here = self._progress.step, self._progress.step_in_epoch
        # a call must end at each step after which something is due
        due = [self._saves, self._reports, self._check, *self._callback_saves]
        limits = [1 if self._ends_after_step else self._call.length, *(each.steps_until_due(step) for each in due)]
        limits.append(None if self._steps_of_epoch is None else self._steps_of_epoch - here)
        return min(limit for limit in limits if limit is not None)

    def _advance(self, result: CallResult, seconds: float) -> None:
        at = self._progress
        self._progress = replace(at, step=at.step + result.steps, step_in_epoch=at.step_in_epoch + result.steps)
        self._hooks.on_step(self._progress.step)
        self._next_steps = self._call.propose(result, seconds)
        self._call.accept(result.vote.next_steps)
        at_end = self._progress.step_in_epoch == self._steps_of_epoch
        self._reports.add(result, seconds, self._progress, at_end=at_end)

    def _check_end(self, result: CallResult) -> None:
        """Report the last steps before the end of the data.

        Raises:
            ConfigError: the data has no batch, or ended earlier than its length says.
        """
        at = self._progress
        if at.step_in_epoch == 0:
            raise ConfigError(Problem(("data",), "the training data is empty; it has no batches"))
        if self._epoch_steps is not None:
            message = f"the data should have {self._epoch_steps} batches, but ended after {at.step_in_epoch}"
            raise ConfigError(Problem(("data",), message))
        self._reports.report_rest(result.logs, at)

    def _finish_epoch(self, at: SaveContext, logs: Logs, seconds: float, rate: float | None) -> None:
        """Record the values of an epoch, and save a checkpoint if one is due.

        Args:
            at: progress and the values that decide which epoch is the best.
            logs: all values of the epoch, including those that callbacks have added.
            rate: the learning rate after the last step.
        """
        asks = self._hooks.is_chief and self._saves.chief_asks(at)
        # lets the supervisor find the task whose slow callback delays the others
        self._hooks.on_meeting()
        if self._train.running_fingerprint is not None:  # before this epoch is saved
            self._train.running_fingerprint.compare(self._progress.step - self._first_step, self._first_step)
        if not self._has_checked_first_epoch:
            self._has_checked_first_epoch = True
            for warning in self._program.recheck_metrics():
                self._hooks.emit(Notice(level="warning", message=warning))
        # a callback may have stopped training in one process only, so all of them agree
        vote = self._program.agree(Vote(finish=bool(self._model.stop_training), save=asks))
        history = {name: list(values) for name, values in self._progress.history.items()}
        for name, value in scalars(logs).items():
            history.setdefault(name, []).append(value)
        self._progress = replace(
            self._progress,
            epoch=at.epoch,
            step_in_epoch=0,
            history=history,
            finished=vote.finish,
            pending_logs=None,
        )
        self._hooks.emit(
            EpochEnded(
                epoch=at.epoch - 1,
                step=self._progress.step,
                seconds=seconds,
                logs=scalars(logs),
                learning_rate=rate,
            )
        )
        at = replace(at, is_last=vote.finish or at.epoch == self._epochs, chief_asks=vote.save)
        if not self._saves.should_save(at):
            return
        is_best = self._hooks.is_chief and self._best.should_save(at)
        if is_best:
            self._best.keep(at)
        self._saver.save(self._program, self._progress, best=is_best)

    def _save_context(self, moment: Moment, **facts: Any) -> SaveContext:
        return SaveContext(moment, self._progress.step, self._hooks.clock(), **facts)

    def _save_if_due(
        self, moment: Moment, *, otherwise: str | None = "training continues", wait: bool = False,
        chief_asks: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint if a policy asks for it; see `Saver.save` for the arguments."""
        if self._saves.should_save(self._save_context(moment, chief_asks=chief_asks)):
            self._saver.save(self._program, self._progress, otherwise=otherwise, wait=wait)

    def _reports_same_values(self) -> bool:
        """Return whether training and validation report the same values; overridden steps may report others."""
        return not any(overrides_method(self._model, name) for name in ("train_step", "test_step"))


def _weights_differ(before: State, now: State) -> bool:
    return any(not np.array_equal(before[name], now[name]) for name in now if name.startswith(f"{WEIGHTS}/"))


class CallLength:
    """Number of steps per graph call.

    Args:
        wanted: a number, or "auto" for about half a second per call, measured by the chief.
        each_batch: whether a callback watches every batch, so that `auto` means 1.
    """

    def __init__(self, wanted: int | str, *, each_batch: bool) -> None:
        self._auto = wanted == "auto" and not each_batch
        self._length = 1 if self._auto or wanted == "auto" else int(wanted)
        self._calls = 0

    @property
    def length(self) -> int:
        return self._length

    def propose(self, result: CallResult, seconds: float) -> int:
        """Return the length that this task proposes after a call; the first call is ignored, because it compiles."""
        self._calls += 1
        if not self._auto or self._calls == 1 or result.steps == 0:
            return self._length
        return min(steps_in_call(seconds / result.steps), 4 * self._length)

    def accept(self, length: int) -> None:
        """Adopt the chief's decision, which is broadcast with the votes."""
        if self._auto and length > 0:
            self._length = length
