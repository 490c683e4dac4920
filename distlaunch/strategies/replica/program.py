"""Program that runs Keras's own `train_step`, or the user's, under `strategy.run`, with many steps per graph call.

All tf.distribute strategies whose replicas work in lockstep use it. The inner loop over steps is in the graph, and the
outer loop in Python.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.data.batches import Source, num_rows
from distlaunch.data.differences import kind_of
from distlaunch.data.graph_clock import now, read_timed, time_row, time_rows
from distlaunch.data.rows import split_rows
from distlaunch.patches import keras_assign, tensorflow_iterators
from distlaunch.patches.keras_branches import branch_together
from distlaunch.patches.keras_private import layers_of, other_list, trainable_list
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.final_weights import set_final_weights
from distlaunch.strategies.finite import losses_are_finite, weights_are_finite
from distlaunch.strategies.local_model import LocalModel
from distlaunch.strategies.patches import keras_losses, keras_replica_metrics
from distlaunch.strategies.patches.keras_gradient_sums import has_sparse_gradients, sum_gradients_first
from distlaunch.strategies.patches.keras_replica_metrics import adds_up, single_metrics, watch_updates
from distlaunch.strategies.predictions import concatenate_batches, make_predict_call
from distlaunch.strategies.protocol import BatchHooks, CallResult, Logs, Program, Steps
from distlaunch.strategies.replica.agreement import Ballots, count_rows, ended_anywhere
from distlaunch.strategies.replica.share import ReplicaShare, StepKind, replica_share
from distlaunch.strategies.replica.sums import Replicas, Sums
from distlaunch.strategies.replica.trial import (
    MAX_ROWS,
    MetricWatch,
    adopt_findings,
    find_reductions,
    findings_to_json,
    losses_need_trial,
    needs_trial,
)
from distlaunch.strategies.replica.variable_check import check_replicas
from distlaunch.strategies.state import State
from distlaunch.strategies.step_times import StepTimes
from distlaunch.strategies.variables import (
    checked_value,
    flat_logs,
    host_value,
    loss_trackers,
    metric_variables,
    optimizers_of,
    overrides_method,
    restore_variables,
    state_variables,
    untracked_state,
    with_wrapped_optimizers,
)

EVALUATION_CALL = 16  # steps per evaluation call: few enough to stop soon, many enough to be fast


class ReplicaProgram(Program):
    """Implementation of `Program` for the `tf.distribute.Strategy` that the model was created under."""

    def __init__(self, strategy: Any, steps: Steps, replicas: Replicas) -> None:
        self._strategy, self._steps, self._replicas = strategy, steps, replicas
        self._model = steps.model
        self._optimizers = optimizers_of(self._model)
        self._local = LocalModel(self._model)
        self._steps_in_epoch = 0
        self._ballots = Ballots(replicas.peers)
        self.notes: list[str] = []
        tensorflow_iterators.install()
        # Sparse gradients must have the same shape in all steps of a graph call, but an uneven last batch changes it.
        # So each call runs one step, until the first trace shows that there are no sparse gradients.
        self._runs_single_steps = replicas.total > 1
        for optimizer in self._optimizers:
            for part in with_wrapped_optimizers(optimizer):
                branch_together(part)
        is_own = steps.logs == "last" and overrides_method(self._model, "train_step")
        self._train_kind = StepKind("mean" if steps.logs == "last" else "part", weighs_gradients=is_own)
        self._test_kind = StepKind("mean", reductions=self._train_kind.reductions, is_test=True)
        self._unverified_metrics: list[Any] = []
        self._tried: set[bool] = set()  # False: training, True: evaluation
        self._late_notes: list[str] = []
        whole: list[Any] = []
        if replicas.total > 1:
            _check_overwritten(self._model)
            check_replicas(strategy, replicas)
            keras_assign.install()
            keras_losses.install()
            keras_replica_metrics.install()
            for place, optimizer in enumerate(self._optimizers):
                sum_gradients_first(optimizer, place)
            whole = self._find_reductions()
            if self._model.compiled and self._model.jit_compile is True:
                self.notes.append(
                    "jit_compile is ignored on replicas. One device with jit_compile would use different dropout "
                    "masks, since random layers draw different numbers under XLA"
                )
        self._gathered_metrics, self._gathers = whole, self._train_kind.reductions.gathers
        self._sums = Sums(strategy, steps, replicas, self._ballots, self._train_kind, self._test_kind, whole)
        trackers = {id(variable) for variable in loss_trackers(self._model)} if steps.logs == "mean" else set()
        # metrics that all replicas compute from all rows are valid in a replica without rows too
        kept = trackers | {id(variable) for metric in whole for variable in metric.variables}
        self._row_variables = [
            *(variable for variable in metric_variables(self._model) if id(variable) not in kept),
            *replica_statistics(self._model),
        ]
        self._waited_before = 0.0
        self._statistics = Statistics(strategy, self._model)
        self._iterator: Any = None
        self._may_end_elsewhere = self._is_process_local = False
        self._distributed: tuple[Source, bool, Any] | None = None
        # TensorFlow's distributed iterator fetches elements ahead to each device, in threads of its own. On CPUs, there
        # is nothing to fetch, and a step of two workers or replicas on two cores takes 0.8 to 0.9 of the time without.
        on_cpu = not tf.config.list_logical_devices("GPU")
        self._reads_parts = on_cpu and (replicas.local == 1 or replicas.peers.number == 1)
        self._train_call: Callable[..., Any] | None = None
        self._test_call: Callable[..., Any] | None = None

    def _find_reductions(self) -> list[Any]:
        """Find out how values add up over replicas; return the metrics that need the rows of all replicas."""
        steps, metrics = self._steps, list(single_metrics(self._model.metrics))
        if steps.sample is None or not (needs_trial(self._model, metrics) or steps.is_own):
            return []
        watch = MetricWatch(metrics)
        # declared, so that no trial has to succeed
        self._train_kind.reductions.metrics.update(at for at, one in enumerate(metrics) if adds_up(one) is False)
        for metric in metrics:
            if not adds_up(metric):
                watch_updates(metric, watch.update)
        was_tried = self._try_steps(metrics)
        kinds = [self._train_kind, self._test_kind]
        # processes may read different rows or round differently, but must exchange the same values
        adopt_findings(kinds, self._replicas.peers.from_chief(findings_to_json(kinds)))
        self._model.reset_metrics()
        found = self._train_kind.reductions.metrics
        others = (metric for index, metric in enumerate(metrics) if index not in found)
        unsure = [one for one in others if adds_up(one) is None]
        self._unverified_metrics = metrics if unsure and was_tried else []
        return [metrics[index] for index in sorted(found)]

    def _try_steps(self, metrics: list[Any]) -> bool:
        """Try the steps on rows of the first batch, and record notes; return whether that worked."""
        steps = self._steps
        assert steps.sample is not None, "checked before"
        tried = [(steps.train, self._train_kind)]
        own = any(overrides_method(self._model, name) for name in ("test_step", "compute_metrics"))
        # with `loop: custom`, only the evaluation computes the compiled losses, and perhaps the compiled metrics
        only_there = steps.logs == "mean" and (
            losses_need_trial(self._model) or (steps.is_own and not all(map(adds_up, metrics)))
        )
        if steps.test is not None and (own or only_there):
            tried.append((steps.test, self._test_kind))
        self._tried.update(kind.is_test for _, kind in tried)
        try:
            rows = steps.sample(MAX_ROWS)
            if int(num_rows(rows)) < 2:
                return False  # one row cannot be split into parts
            for step, kind in tried:
                _, notes = find_reductions(self._strategy, self._model, step, kind, metrics, rows)
                self.notes.extend(note for note in notes if note not in self.notes)
            return True
        except ConfigError:
            raise
        # the user's step may raise any error on a part of a batch, and replicas may never get such a part
        except Exception as error:
            reason = reason_of(error)
            self.notes.append(
                f"could not find out how the values of a step add up over replicas ({reason}); its losses are treated "
                "as means over rows, and its metrics as sums"
            )
            return False

    # data

    def set_train_data(self, source: Source) -> None:
        self._iterator = iter(self._distribute(source))
        self._may_end_elsewhere, self._is_process_local = self._may_differ(source), source.is_process_local

    def _may_differ(self, source: Source) -> bool:
        """Return whether other processes may reach the end of their data at another step."""
        return source.ends and self._replicas.peers.number > 1

    def _distribute(self, source: Source, *, whole: bool = False) -> Any:
        kept = self._distributed
        if kept is None or kept[0] is not source or kept[1] != whole:
            # kept for the next validation with the same source, because tracing its functions takes 0.03 s or more
            number, first = (1, 0) if whole else (self._replicas.total, self._replicas.first)
            parts = split_rows(source, first_replica=first, num_local=self._replicas.local, num_replicas=number)
            # `experimental_distribute_dataset` would split the batches itself
            distributed = (
                parts if self._reads_parts else self._strategy.distribute_datasets_from_function(lambda _: parts)
            )
            self._distributed = kept = source, whole, distributed
        return kept[2]

    def _next(self, iterator: Any) -> Any:
        """Return the next element of `_distribute`, with a part for each local replica."""
        if not self._reads_parts or self._replicas.local == 1:
            return next(iterator)
        parts = [next(iterator) for _ in range(self._replicas.local)]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    # steps

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        if self._train_call is None:
            self._make_extras()
            make = functools.partial(
                self._make_call,
                self._train_step,
                list(self._sums.extras.values()),
                stops=self._steps.stop_at_nonfinite,
            )
            how = self._may_end_elsewhere, self._is_process_local
            arguments = self._iterator, np.int32(1), self._ballots.cast(vote), *how
            self._train_call = self._make_tried_call(make, arguments, self._steps.train, self._train_kind)
        done, votes, logs, extras, nonfinite, times = 0, None, {}, [], None, StepTimes()
        while done < num_steps:
            wanted = 1 if self._runs_single_steps else num_steps - done
            # a NumPy number, because a Python int would cause one trace for each number of steps
            made, votes, logs, extras, rows = self._train_call(
                self._iterator,
                np.int32(wanted),
                self._ballots.cast(vote),
                self._may_end_elsewhere,
                self._is_process_local,
            )
            self._runs_single_steps = self._gathers or any(map(has_sparse_gradients, self._optimizers))
            if nonfinite is None and (first := self._ballots.first_nonfinite(votes)):
                nonfinite = done + first
            done += int(made)
            # the other rows are of steps that did not run
            times += StepTimes.of(rows.numpy()[: int(made)], self._waited_since_last_call())
            self._ballots.check_ends(votes, self._steps_in_epoch + done, "training")
            if int(made) < wanted or (nonfinite and self._steps.stop_at_nonfinite):
                break
        self._steps_in_epoch += done
        # if a loss that is not finite has ended the call, the data counts as not ended
        ended = done < num_steps and not (nonfinite and self._steps.stop_at_nonfinite)
        logs = self._sums.to_logs(logs, extras, self._steps_in_epoch)
        return CallResult(done, ended, logs, self._ballots.vote(votes), nonfinite, times)

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        # other processes cannot read process-local rows
        whole = self._test_kind.takes_whole_batches and not source.is_process_local
        if self._test_call is None:
            assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
            trace = self._tracing(self._steps.test, self._test_kind)
            self._sums.make_test_extras(trace, iter(self._distribute(source, whole=whole)))
            extras = list(self._sums.test_extras.values())
            make = functools.partial(self._make_call, self._test_step, extras, stops=False, whole=whole)
            ballot = self._ballots.cast(Vote())
            how = self._may_differ(source), source.is_process_local
            arguments = iter(self._distribute(source, whole=whole)), np.int32(1), ballot, *how
            self._test_call = self._make_tried_call(make, arguments, self._steps.test, self._test_kind)
        trained = self._train_call is not None
        with self._statistics.of_first_replica() if trained else contextlib.nullcontext():
            return self._evaluate(source, max_steps, should_stop, hooks, whole=whole)

    def _evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None,
        *,
        whole: bool,
    ) -> Logs | None:
        assert self._test_call is not None, "made before"
        self._reset_metrics()
        iterator = iter(self._distribute(source, whole=whole))
        remaining, at = max_steps, 0
        if hooks is not None and source.num_batches is not None:
            # so that no hook is called after the last batch
            remaining = min(source.num_batches, remaining or source.num_batches)
        while True:
            hooked = hooks if hooks is not None and hooks.has(at) else None
            steps_per_call = EVALUATION_CALL if hooked is None and not self._gathers else 1
            wanted = steps_per_call if remaining is None else min(steps_per_call, remaining)
            if hooked is not None:
                hooked.begin(at)
            ballot = self._ballots.cast(Vote(stop=should_stop()))
            how = self._may_differ(source), source.is_process_local
            done, votes, logs, extras, _ = self._test_call(iterator, np.int32(wanted), ballot, *how)
            if self._ballots.vote(votes).stop:
                # in all processes, since they have the same sum of votes
                return None
            self._ballots.check_ends(votes, at + int(done), kind_of(source.name))
            if hooked is not None and int(done):
                hooked.end(at, self._sums.to_logs(logs, extras, self._steps_in_epoch, test=True))
            at += int(done)
            remaining = None if remaining is None else remaining - wanted
            if int(done) < wanted or remaining == 0:
                return self._sums.to_logs(logs, extras, self._steps_in_epoch, test=True)

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        strategy, replicas = self._strategy, self._replicas
        call = make_predict_call(strategy, self._model, replicas.peers.number)
        with_counts = (
            tf.function(functools.partial(count_rows, strategy), autograph=False)
            if source.is_process_local
            else lambda one: one
        )
        batches: list[Any] = []
        iterator = iter(self._distribute(source))
        while True:
            element = with_counts(self._next(iterator))
            ended = int(strategy.experimental_local_results(element[2])[0]) == 0  # every replica has the same total
            if replicas.peers.has_data_ended(source, ended=ended, steps=len(batches), unknown=self._may_differ(source)):
                break
            # not before each batch, because a vote needs an all-reduce
            if len(batches) % EVALUATION_CALL == 0 and self.agree(Vote(stop=should_stop())).stop:
                return None
            batches.append(call(element))
        return concatenate_batches(batches)

    def reset_metrics(self) -> None:
        self._steps_in_epoch = 0
        self._reset_metrics()
        for variable in self._sums.extras.values():
            variable.assign(0.0)  # Keras resets only its metrics

    def _reset_metrics(self) -> None:
        self._model.reset_metrics()
        if self._gathered_metrics:
            # in each replica: outside, TensorFlow divides the initial value by the number of replicas
            self._strategy.run(
                tf.function(lambda: [metric.reset_state() for metric in self._gathered_metrics], autograph=False)
            )

    def _make_tried_call(
        self, make: Callable[[], Any], arguments: tuple[Any, ...], step: Callable[[Any], Any], kind: StepKind
    ) -> Callable[..., Any]:
        """Return a graph function whose trace has met only values of which it is known how they add up.

        The model alone does not show that a function of the user's looks rows up or adds a loss. The trace does. If it
        has met such a value, the step is tried, and traced again.

        Args:
            make: returns the graph function.
            arguments: its arguments.
        """
        call, sample = make(), self._steps.sample
        # a trial of the training step finds the losses of the evaluation too
        if self._replicas.total == 1 or sample is None or {kind.is_test, False} & self._tried:
            return call
        call.get_concrete_function(*arguments)
        if not kind.met:
            return call
        self._tried.add(kind.is_test)
        late = replace(kind, reductions=deepcopy(kind.reductions), logs={}, met=set())
        try:
            rows = sample(MAX_ROWS)
            if int(num_rows(rows)) >= 2:
                _, notes = find_reductions(self._strategy, self._model, step, late, [], rows)
                self._late_notes.extend(note for note in notes if note not in self.notes)
        except ConfigError:
            raise
        except Exception as error:  # as in `_try_steps`
            what = " and ".join(f"{each} gradients" if each == "sparse" else f"{each} losses" for each in kind.met)
            self._late_notes.append(f"could not find out how {what} add up over replicas ({reason_of(error)})")
        adopt_findings([late], self._replicas.peers.from_chief(findings_to_json([late])))
        found = kind.reductions
        if late.reductions.added == found.added and late.reductions.same_rows == found.same_rows:
            return call
        found.added.update(late.reductions.added)
        found.same_rows.update(late.reductions.same_rows)
        return make()

    def recheck_metrics(self) -> list[str]:
        steps, metrics = self._steps, self._unverified_metrics
        notes, self._late_notes = self._late_notes, []
        if not metrics or steps.sample is None:
            return notes
        # the trained model predicts other values, for which a metric may no longer add up
        kind = self._train_kind
        found = set(kind.reductions.metrics)
        kind = replace(kind, reductions=deepcopy(kind.reductions), logs={})
        late, _ = find_reductions(self._strategy, self._model, steps.train, kind, metrics, steps.sample(MAX_ROWS))
        names = [metrics[index].name for index in sorted(late.metrics - found)]
        notes.extend(
            f"metric '{name}' is wrong: a trial after the first epoch shows that it does not add up over replicas; set "
            "additive: false for it in compile.metrics"
            for name in names
        )
        return notes

    def agree(self, vote: Vote) -> Vote:
        return self._sums.agree(vote)

    def _compile_with_xla(self, replica_step: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        # only the step, because the loop around it reads from the iterator, which XLA does not support
        wanted = self._replicas.total == 1 and self._model.compiled and self._model.jit_compile is True
        return tf.function(replica_step, jit_compile=True) if wanted else replica_step

    def _make_call(
        self, replica_step: Callable[..., tf.Tensor], extras: list[tf.Variable], *, stops: bool, whole: bool = False
    ) -> Callable[..., Any]:
        """Return a graph function for several steps.

        Args:
            replica_step: the step of a replica, which returns whether its losses are finite.
            extras: variables that are summed in addition to the metrics.
            stops: whether the call ends after the first step whose losses are not finite.
            whole: whether each replica computes whole batches.
        """
        strategy, replica_step = self._strategy, self._compile_with_xla(replica_step)

        @tf.autograph.experimental.do_not_convert
        def run(element: Any) -> tf.Tensor:
            finite = strategy.run(replica_step, args=element)
            return tf.reduce_all(tf.stack(strategy.experimental_local_results(finite)))

        @tf.autograph.experimental.do_not_convert
        def totals(element: Any) -> Any:
            return strategy.experimental_local_results(element[2])

        # All processes must leave the loop after the same step. Several processes decide by the weights, which are the
        # same in all of them, and not by the losses, which differ.
        alone = self._replicas.peers.number == 1

        # AutoGraph converts `while` and `break` here, but not the functions that are called
        @tf.function(reduce_retracing=True)
        def call(iterator: Any, num_steps: tf.Tensor, ballot: tf.Tensor, may_differ: bool, own: bool) -> Any:
            done, nonfinite, ended = tf.constant(0), tf.constant(0), tf.constant(False)
            at, times = now(ballot), time_rows(num_steps)
            while done < num_steps:
                element, waited = read_timed(lambda: self._next(iterator), at, totals)
                if own:
                    element = count_rows(strategy, element)
                ended = totals(element)[0] == 0
                # `may_differ` is a Python bool, so that the usual graph does not contain this all-reduce
                if ended_anywhere(strategy, ended) if may_differ else ended:
                    break
                finite = run(element)
                done += 1
                weights_finite = weights_are_finite(self._model.trainable_variables) if stops else tf.constant(True)
                nonfinite = tf.where((finite & weights_finite) | (nonfinite > 0), nonfinite, done)  # keep the first one
                began, at = at, now(nonfinite)
                rows = strategy.experimental_local_results(element[1])
                times = times.write(done - 1, time_row(waited, began, at, rows))
                if stops and not (finite & weights_finite if alone else weights_finite):
                    break
            summed = self._sums.collect(self._ballots.with_results(ballot, nonfinite, ended), extras, whole=whole)
            return done, *summed, times.stack()

        return call

    def _waited_since_last_call(self) -> float | None:
        """Return the seconds in which gradients have waited for those of other processes; None if not measured."""
        waited = self._replicas.sums.waited_s()
        if waited is None:
            return None
        before, self._waited_before = self._waited_before, waited
        return waited - before

    def _make_extras(self) -> None:
        self._sums.make_extras(self._tracing(self._steps.train, self._train_kind), self._iterator)

    def _tracing(self, step: Callable[[Any], Any], kind: StepKind) -> Callable[[Any], Any]:
        def trace(iterator: Any) -> Any:
            element = self._next(iterator)  # without the row counts of other processes, since only shapes matter here
            return self._strategy.run(lambda *element: self._run_with_share(step, kind, *element), args=element)

        return trace

    def _train_step(self, batch: Any, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        returned = self._run_with_share(self._steps.train, self._train_kind, batch, rows, total, start)
        returned = flat_logs(returned) if isinstance(returned, dict) else {}
        if self._steps.logs == "last":
            self._sums.store_results(returned, rows, total)
        else:
            for name, variable in self._sums.extras.items():
                variable.assign_add(tf.cast(tf.reduce_mean(returned[name]), variable.dtype))
        # the loss of a stand-in row does not count
        return losses_are_finite(returned) | (rows == 0)

    def _test_step(self, batch: Any, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
        returned = self._run_with_share(self._steps.test, self._test_kind, batch, rows, total, start)
        if self._sums.test_extras:
            self._sums.store_results(flat_logs(returned), rows, total, test=True)
        return tf.constant(True)

    def _run_with_share(
        self,
        step: Callable[[Any], Any],
        kind: StepKind,
        batch: Any,
        rows: tf.Tensor,
        total: tf.Tensor,
        start: tf.Tensor,
    ) -> Any:
        if self._replicas.total == 1:
            return step(batch)
        before = [tf.identity(variable.value) for variable in self._row_variables]
        sums = self._replicas.sums
        share = ReplicaShare(rows, total, start, kind, sums, has_all_rows=kind.takes_whole_batches)
        with replica_share(share):
            returned = step(batch)
        for variable, value in zip(self._row_variables, before, strict=True):
            # a replica without rows computes a stand-in row, which must have no effect
            variable.assign(tf.where(rows > 0, tf.convert_to_tensor(variable.value), value))
        return returned

    # state

    def finalize(self) -> None:
        with self._strategy.scope():
            set_final_weights(self._model)

    def snapshot(self) -> State:
        state = {name: host_value(variable) for name, variable in state_variables(self._model).items()}
        state.update(untracked_state(self._model))
        state.update(self._sums.values())
        state["log/steps_in_epoch"] = np.array(self._steps_in_epoch, np.int64)
        return state

    def restore(self, state: State) -> None:
        if self._steps.logs == "mean" and self._iterator is not None:
            self._make_extras()  # creates the variables whose values the state contains
        restore_variables(self._model, state)
        partial = self._sums.partial_variables()
        # if the step has logged other values before, the means of this epoch start at zero
        known = all(name in state for name in partial)
        sums = state if known else {name: np.zeros(v.shape) for name, v in partial.items()}
        for name, variable in partial.items():
            self._sums.assign(name, variable, checked_value(name, variable, sums), sums)
        self._steps_in_epoch = int(state["log/steps_in_epoch"])


def _check_overwritten(model: keras.Model) -> None:
    """Raise ConfigError if a layer has weights whose gradient is their next value, which must not be summed."""
    for layer in layers_of(model):
        own = [*trainable_list(layer), *other_list(layer)]
        if layer.trainable and any(variable.overwrite_with_gradient for variable in own):
            message = (
                f"got replicas, but the layer '{layer.path}' trains with float8 ({layer.dtype_policy.name}): its "
                "scales depend on the largest values of all rows, and replicas would add them up; use another dtype "
                "for this layer, or one_device"
            )
            raise ConfigError(Problem(("strategy", "kind"), message))


def replica_statistics(model: keras.Model) -> list[Any]:
    """Return the statistics of Keras layers that normalize with the rows of their replica."""
    norms = (layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization))
    return [variable for layer in norms if layer.trainable and not layer.synchronized for variable in other_list(layer)]


class Statistics:
    """Statistics of batches in layers, such as the moving averages of BatchNormalization, in each replica.

    A checkpoint contains the first replica's statistics. An evaluation during training uses these in all replicas,
    because it would otherwise evaluate a model that is never saved.
    """

    def __init__(self, strategy: Any, model: keras.Model) -> None:
        self._strategy, self._model = strategy, model
        self._copy_call = tf.function(lambda: strategy.run(self._copy_first), autograph=False)
        self._restore_call = tf.function(
            lambda own, first: strategy.run(self._restore, args=(own, first)), autograph=False
        )

    @functools.cached_property
    def _variables(self) -> list[Any]:
        # a frozen layer does not update its statistics, which may be large
        found = [variable for layer in layers_of(self._model) if layer.trainable for variable in other_list(layer)]
        floats = (variable for variable in found if keras.backend.is_float_dtype(variable.dtype))
        return list({id(variable): variable for variable in floats}.values())

    @contextlib.contextmanager
    def of_first_replica(self) -> Iterator[None]:
        """Give all replicas the first replica's statistics in this context; every process must enter it.

        Afterwards, each replica has its own statistics again, because training may use them, as
        `BatchNormalization(renorm=True)` does. A statistic that has changed in the context keeps its new value.
        """
        if not self._variables or self._strategy.num_replicas_in_sync == 1:
            yield
            return
        own, first = self._copy_call()
        try:
            yield
        finally:
            self._restore_call(own, first)

    def _copy_first(self) -> tuple[list[Any], list[Any]]:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        own = [tf.identity(variable.value) for variable in self._variables]
        # the other replicas add zeros, so that the sum is exactly the first replica's value
        parts = [tf.where(is_first, value, tf.zeros_like(value)) for value in own]
        first = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        for variable, value in zip(self._variables, first, strict=True):
            variable.assign(value)
        return own, first

    def _restore(self, own: list[Any], first: list[Any]) -> None:
        for variable, value, copied in zip(self._variables, own, first, strict=True):
            current = tf.convert_to_tensor(variable.value)
            variable.assign(tf.where(tf.reduce_all(tf.equal(current, copied)), value, current))
