"""Assigns steps to the workers of a parameter-server cluster.

The unit of work is a block: a few consecutive global batches, on which one worker trains in one graph call. Variables
are on the servers, and workers update them in place. A block returns its contribution to the metrics, which the
coordinator adds when it arrives. If a worker dies, another worker repeats its block, which therefore counts once. The
coordinator counts the steps and sets `optimizer.iterations`, because increments by several workers would get lost.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.data.batches import Source
from distlaunch.data.graph_clock import now, read_timed, time_row, time_rows
from distlaunch.data.recorded_rows import Rows
from distlaunch.patches.keras_private import raw_counter, replaced_values
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.final_weights import set_final_weights
from distlaunch.strategies.finite import losses_are_finite
from distlaunch.strategies.local_model import LocalModel
from distlaunch.strategies.parameter_server.partition import placement_of
from distlaunch.strategies.parameter_server.worker_batches import (
    FirstPasses,
    batch_spec,
    check_data,
    fetch,
    first_pass,
    last_batch,
    read_failure,
    report_times,
    send_times,
)
from distlaunch.strategies.patches.keras_replica_metrics import adds_up, single_metrics
from distlaunch.strategies.protocol import BatchHooks, CallResult, Logs, Program, Steps
from distlaunch.strategies.replica.trial import MAX_ROWS, metrics_that_do_not_add_up
from distlaunch.strategies.stand_in import StandIn
from distlaunch.strategies.state import State
from distlaunch.strategies.step_times import StepTimes
from distlaunch.strategies.variables import (
    flat_logs,
    host_value,
    logs_to_host,
    may_return_more,
    metric_results,
    metric_variables,
    named_metrics,
    optimizers_of,
    placed_variables,
    restore_variables,
    state_variables,
    untracked_state,
    with_wrapped_optimizers,
)

BLOCKS_PER_WORKER = 4  # in a call: with fewer, a slow worker delays the others; with more, blocks are too short
EVALUATION_BLOCK = 16  # steps
_STALL_S = 30.0  # time after which a message is printed; a call usually takes about half a second
_POLL_S = 0.002  # largest delay in noticing the end of a call
_never_set = threading.Event()


class CoordinatorProgram(Program):
    """Implementation of `Program` with a `ClusterCoordinator`, for a model created under its strategy."""

    def __init__(self, strategy: Any, coordinator: Any, steps: Steps, num_workers: int) -> None:
        self._strategy, self._coordinator, self._steps, self._num_workers = strategy, coordinator, steps, num_workers
        self._model = steps.model
        self._metrics = metric_variables(self._model)
        self._counters = [
            raw_counter(part)
            for optimizer in optimizers_of(self._model)
            if _counts_every_step(optimizer)
            for part in with_wrapped_optimizers(optimizer)
        ]
        self._increments = [0] * len(self._counters)
        self._counts = [int(host_value(counter)) for counter in self._counters]
        self._check_metrics_add_up()
        self._model.reset_metrics()
        # read after the reset, because the initial value of a metric may not be 0
        self._zeros = [host_value(variable) for variable in self._metrics]
        self._totals = self._initial_totals()
        self._log_names: list[str] | None = None
        self._test_log_names: list[str] = []
        self._log_sums: dict[str, float] = {}
        self._local = LocalModel(self._model)
        self._steps_in_epoch = 0
        self._source: Source | None = None
        self._next_batch = 0
        self._train_call: Any = None
        self._test_calls: dict[str, Any] = {}
        self._first_passes = FirstPasses()
        self._times: list[StepTimes] = []  # of workers in this process; other workers report their times themselves
        report_times(self._times.append)

    def _check_metrics_add_up(self) -> None:
        steps, metrics = self._steps, list(single_metrics(self._model.metrics))
        undeclared = [metric for metric in metrics if adds_up(metric) is None]
        wrong = [metric for metric in metrics if adds_up(metric) is False]
        if undeclared and steps.test is not None and steps.sample is not None:
            wrong += metrics_that_do_not_add_up(self._model, steps.test, undeclared, steps.sample(MAX_ROWS))
        if wrong:
            message = f"metric '{wrong[0].name}' does not add up over batches, which workers compute independently"
            hint = "remove it, and compute it with `distlaunch evaluate`, which uses one device"
            raise ConfigError(Problem(("compile", "metrics"), f"{message}; {hint}"))

    # data

    def set_train_data(self, source: Source) -> None:
        check_data(source, self._num_workers)
        self._source, self._next_batch = source, source.first
        # traced again, because the graph contains the source's name and length
        self._train_call = None

    # steps

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        assert self._source is not None, "set_train_data comes first"
        if self._train_call is None:
            if self._log_names is None:
                always = self._steps.logs == "mean"
                self._log_names = self._extra_log_names(self._steps.train, "train_step", self._source, always=always)
            self._train_call = self._make_call(self._steps.train, self._source, self._log_names)
        size = max(1, num_steps // (BLOCKS_PER_WORKER * self._num_workers))
        blocks = self._distribute_blocks(self._train_call, self._source, self._next_batch, num_steps, size)
        done = sum(block.done for block in blocks)
        spoilt = [index * size + block.nonfinite for index, block in enumerate(blocks) if block.nonfinite]
        nonfinite = min(spoilt, default=None)
        ended = done < num_steps and not (nonfinite and self._steps.stop_at_nonfinite)
        self._next_batch += done
        self._steps_in_epoch += done
        self._count(done)
        self._add(blocks, self._totals)
        for block in blocks:
            for name, value in zip(self._log_names or [], block.logs, strict=True):
                self._log_sums[name] = value + (self._log_sums.get(name, 0.0) if self._steps.logs == "mean" else 0.0)
        times, self._times[:] = sum(self._times, StepTimes()), []
        return CallResult(done, ended, self._logs(self._totals, own=True), vote, nonfinite, times)

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
        if source.name not in self._test_calls:
            check_data(source, self._num_workers)
            self._test_log_names = self._extra_log_names(self._steps.test, "test_step", source, always=False)
            self._test_calls[source.name] = self._make_call(self._steps.test, source, self._test_log_names)
        totals, last = self._initial_totals(), []
        limit = min((n for n in (source.num_batches, max_steps) if n is not None), default=None)
        at = 0
        while limit is None or at < limit:
            if should_stop():
                return None
            hooked = hooks if hooks is not None and hooks.has(at) else None
            steps_per_call = EVALUATION_BLOCK * BLOCKS_PER_WORKER * self._num_workers if hooked is None else 1
            wanted = steps_per_call if limit is None else min(steps_per_call, limit - at)
            if hooked is not None:
                hooked.begin(at)
            blocks = self._distribute_blocks(self._test_calls[source.name], source, at, wanted, EVALUATION_BLOCK)
            self._add(blocks, totals)
            last = next((block.logs for block in reversed(blocks) if block.done), last)
            if sum(block.done for block in blocks) < wanted:
                break
            if hooked is not None:
                hooked.end(at, self._test_logs(totals, last))
            at += wanted
        return self._test_logs(totals, last)

    def last_batch(self, source: Source, number: int, max_bytes: int) -> Rows | None:
        """Return a batch that a worker has just read; see `worker_batches.last_batch`."""
        return last_batch(source, number, self._num_workers, max_bytes)

    def _distribute_blocks(self, call: Any, source: Source, first: int, num_steps: int, size: int) -> list[Block]:
        """Distribute a range of batches in blocks to the workers, and wait until all blocks are done."""
        results = []
        for start in range(0, num_steps, size):
            # each block gets the optimizers' counters at its first step, because blocks run in any order
            counts = [count + start * more for count, more in zip(self._counts, self._increments, strict=True)]
            order = np.array([first + start, min(size, num_steps - start), *counts], np.int64)
            results.append(self._coordinator.schedule(call, args=(tf.constant(order),)))
        _wait_for_blocks(self._coordinator)
        blocks = [_unpack_block(result.fetch(), self._zeros) for result in results]
        self._first_passes.add(source, [block.first_pass for block in blocks])
        return blocks

    def _make_call(self, step: Callable[..., Any], source: Source, log_names: list[str]) -> Any:
        """Return the graph function of a block, which returns one float64 vector.

        Its argument is an int64 vector: index of the first batch, number of steps, and the optimizers' counters.
        """
        spec = batch_spec(source.elements, source.load)
        trains = step is self._steps.train
        mean = self._steps.logs == "mean" and trains
        stops = self._steps.stop_at_nonfinite and trains

        @tf.autograph.experimental.do_not_convert
        def one_step(batch: Any, counts: Any, metrics: Any, logs: Any) -> Any:
            with (
                _with_replaced_values(self._counters, counts) as counters,
                _with_replaced_values(self._metrics, metrics) as cells,
            ):
                returned = self._strategy.run(step, args=(batch,))
                returned = flat_logs(returned) if isinstance(returned, dict) else {}
            if trains:
                self._increments = [cell.assignments for cell in counters]
            values = [tf.cast(tf.reduce_mean(returned[name]), tf.float64) for name in log_names]
            logs = [old + new if mean else new for old, new in zip(logs, values, strict=True)]
            return [c.tensor for c in counters], [c.tensor for c in cells], logs, losses_are_finite(returned)

        def rows_of(fetched: Any) -> tf.Tensor:
            return fetched[1]

        def call(order: tf.Tensor) -> tf.Tensor:
            worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
            first, number = order[0], order[1]
            counts = [tf.cast(order[2 + i], v.dtype) for i, v in enumerate(self._counters)]
            metrics = [tf.constant(zero) for zero in self._zeros]
            logs = [tf.constant(0.0, tf.float64) for _ in log_names]
            done, nonfinite = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
            at, times = now(order), time_rows(tf.cast(number, tf.int32))
            while done < number:
                read = functools.partial(fetch, source, worker, first + done, spec)
                (batch, rows), waited = read_timed(read, at, rows_of)
                if rows == 0:
                    break
                counts, metrics, logs, finite = one_step(batch, counts, metrics, logs)
                done += 1
                nonfinite = tf.where(finite | (nonfinite > 0), nonfinite, done)
                began, at = at, now(nonfinite)
                times = times.write(tf.cast(done - 1, tf.int32), time_row(waited, began, at, [rows]))
                if stops and not finite:
                    break
            if trains:
                send_times(times.stack()[:done])
            report = [done, nonfinite, first_pass(source, worker), *metrics, *logs]
            parts = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in report]
            return tf.concat(parts, 0)

        with self._strategy.scope():
            # the trace finds the counters' increments per step, which the first block needs
            return tf.function(call).get_concrete_function(tf.TensorSpec([2 + len(self._counters)], tf.int64))

    def _extra_log_names(self, step: Callable[..., Any], name: str, source: Source, *, always: bool) -> list[str]:
        """Return the names of scalars that a step returns, if they are not just the model's metrics.

        Args:
            name: the step's method in Keras.
            always: whether to return the names even if they are just those of the metrics.
        """
        if not always and not may_return_more(self._model, name):
            return []
        spec = batch_spec(source.elements, source.load)

        def trace(batch: Any) -> Any:
            counts = [tf.cast(0, counter.dtype) for counter in self._counters]
            metrics = [tf.constant(zero) for zero in self._zeros]
            with _with_replaced_values(self._counters, counts), _with_replaced_values(self._metrics, metrics):
                return self._strategy.run(step, args=(batch,))

        with self._strategy.scope():
            returned = tf.function(trace, autograph=False).get_concrete_function(spec).structured_outputs
        names = set(flat_logs(returned)) if isinstance(returned, dict) else set()
        return sorted(names) if always or names != set(self._logs(self._zeros, own=False)) else []

    def _count(self, done: int) -> None:
        self._counts = [count + done * more for count, more in zip(self._counts, self._increments, strict=True)]
        for counter, count in zip(self._counters, self._counts, strict=True):
            counter.assign(count)

    # metrics

    def _initial_totals(self) -> list[np.ndarray]:
        # in float64, because counts above 2**24 are not exact in float32
        return [np.array(zero, np.float64) for zero in self._zeros]

    def _add(self, blocks: list[Block], totals: list[np.ndarray]) -> None:
        for block in blocks:
            for total, value, zero in zip(totals, block.metrics, self._zeros, strict=True):
                total += value - zero  # each block starts with the initial values

    def _logs(self, totals: list[np.ndarray], *, own: bool) -> Logs:
        tensors = [tf.constant(t, v.dtype) for t, v in zip(totals, self._metrics, strict=True)]
        with tf.device("CPU:0"), _with_replaced_values(self._metrics, tensors):
            results = metric_results(self._model)
            values = {name: np.asarray(tf.convert_to_tensor(value)) for name, value in results.items()}
        if own and self._log_names and self._steps.logs == "last":
            values = {}  # as in Keras, the step's own logs replace the metrics
        if own:
            scale = max(self._steps_in_epoch, 1) if self._steps.logs == "mean" else 1
            values.update({name: np.asarray(value / scale) for name, value in self._log_sums.items()})
        return logs_to_host(values)

    def _test_logs(self, totals: list[np.ndarray], last: list[float]) -> Logs:
        # as in Keras, the step's own results for the last batch replace the metrics
        own = dict(zip(self._test_log_names, last, strict=True)) if last else {}
        return logs_to_host(own) if own else self._logs(totals, own=False)

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> None:
        raise UsageError("parameter servers cannot predict; `distlaunch predict` uses their checkpoints on one device")

    def reset_metrics(self) -> None:
        self._steps_in_epoch, self._log_sums, self._totals = 0, {}, self._initial_totals()

    # state

    def finalize(self) -> None:
        with self._strategy.scope():
            set_final_weights(self._model)

    def placement(self) -> list[dict[str, Any]]:
        return placement_of(placed_variables(self._model))

    def snapshot(self) -> State:
        state = {name: host_value(variable) for name, variable in state_variables(self._model).items()}
        state.update(untracked_state(self._model))
        for (name, variable), total in zip(named_metrics(self._model).items(), self._totals, strict=True):
            state[name] = total.astype(tf.as_dtype(variable.dtype).as_numpy_dtype)
        for name, value in self._log_sums.items():
            state[f"log/{name}"] = np.array(value, np.float32)
        state["log/steps_in_epoch"] = np.array(self._steps_in_epoch, np.int64)
        return state

    def restore(self, state: State) -> None:
        with self._strategy.scope():  # in which lookup layers make tables for all workers
            restore_variables(self._model, state)
        self._counts = [int(host_value(counter)) for counter in self._counters]
        self.reset_metrics()
        for (name, _), total in zip(named_metrics(self._model).items(), self._totals, strict=True):
            if name in state:
                total[...] = state[name]
        self._log_sums = {
            name.removeprefix("log/"): float(value)
            for name, value in state.items()
            if name.startswith("log/") and name != "log/steps_in_epoch"
        }
        self._steps_in_epoch = int(state.get("log/steps_in_epoch", 0))


def _counts_every_step(optimizer: Any) -> bool:
    """Return whether an optimizer counts every step.

    A LossScaleOptimizer skips some steps, so the worker counts the others. It is allowed with one worker only.
    """
    return not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


@dataclass(frozen=True)
class Block:
    """Result of a block.

    Attributes:
        done: number of steps done.
        nonfinite: the first step of the block, from 1, whose loss was not finite; 0 if there is none.
        first_pass: the worker's report on its data; see `worker_batches.first_pass`.
        metrics: values of the metrics' variables after the block.
        logs: values that the step returns in addition to the metrics.
    """

    done: int
    nonfinite: int
    first_pass: tuple[int, ...]
    metrics: list[np.ndarray]
    logs: list[float]


def _unpack_block(vector: np.ndarray, fresh: list[np.ndarray]) -> Block:
    """Return the block that a graph call has returned as a vector.

    Args:
        fresh: values of the metrics before any step.
    """
    sizes = [1, 1, 3, *(value.size for value in fresh)]
    done, nonfinite, first_pass, *metrics, logs = np.split(np.asarray(vector), np.cumsum(sizes))
    shaped = [value.reshape(like.shape) for value, like in zip(metrics, fresh, strict=True)]
    return Block(int(done[0]), int(nonfinite[0]), tuple(map(int, first_pass)), shaped, logs.tolist())


def _wait_for_blocks(coordinator: Any) -> None:
    """Wait until all blocks are done, and raise the error of a worker's data function, if there is one."""
    report_after_s = _STALL_S
    began = time.monotonic()
    try:
        while not coordinator.done():
            _never_set.wait(_POLL_S)
            waited = time.monotonic() - began
            if waited > report_after_s:
                report_after_s *= 2
                print(f"waiting for the workers' steps for {waited:.0f} s; one may be suspended", flush=True)
        coordinator.join()
    except tf.errors.OpError:
        # TensorFlow's error has only the text of an error in a data function
        if (error := read_failure()) is not None:
            raise error from None
        raise


class _ReplacedValue(StandIn):
    """Value of a Keras variable while a block is traced: a tensor, which an assignment replaces by another tensor."""

    def __init__(self, tensor: tf.Tensor, name: str) -> None:
        self.tensor, self._name = tensor, name
        self._graph = _current_graph()
        self.assignments = 0

    @property
    def dtype(self) -> tf.DType:
        return self.tensor.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.tensor.shape

    def as_tensor(self) -> tf.Tensor:
        return self.tensor

    def assign(self, value: Any) -> None:
        # a tensor of a branch or a loop body cannot be used outside
        if _current_graph() is not self._graph:
            message = (
                f"the step updates '{self._name}' inside a condition or loop, which parameter_server does not support"
            )
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; update it in every step"))
        self.tensor = tf.cast(value, self.tensor.dtype)
        self.assignments += 1


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def _with_replaced_values(variables: list[Any], tensors: list[tf.Tensor]) -> Iterator[list[_ReplacedValue]]:
    """Use cells with these tensors as the values of the variables, in this context."""
    cells = [_ReplacedValue(tensor, variable.path) for variable, tensor in zip(variables, tensors, strict=True)]
    with replaced_values(variables, cells):
        yield cells
