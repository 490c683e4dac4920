"""Training and evaluation on a DTensor mesh with functional steps.

A traced call reads all variables, computes the new values, and assigns all variables at the end. The reason is that
DTensor may return the old value, without an error, for a variable that is read after its assignment.

A call takes several milliseconds, in which a small model could make several steps. After some steps, a second call
therefore makes the steps of several batches. Both calls give the same numbers, to the bit.

A last batch that cannot be split evenly is replicated on every device, because padding rows would count in unweighted
metrics and in BatchNorm.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.base.call_length import BLOCK_STEPS
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.patches.keras_functional_optimizer import make_functional
from distlaunch.patches.keras_private import put_value, value_of
from distlaunch.patches.tensorflow_random import change_draws
from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.dtensor.arrays import Layout, Mesh, place
from distlaunch.strategies.dtensor.feed import BatchQueue, Feed, Shapes, shapes_of
from distlaunch.strategies.dtensor.variable import MeshVariable
from distlaunch.strategies.final_weights import set_final_weights
from distlaunch.strategies.finite import loss_probe
from distlaunch.strategies.local_model import LocalModel
from distlaunch.strategies.mesh.functional_step import (
    extra_log_names,
    extra_test_logs,
    predictions_of,
)
from distlaunch.strategies.mesh.layout import Axes, slot_layout
from distlaunch.strategies.mesh.parts import StoredVariable
from distlaunch.strategies.mesh.program import MeshProgram
from distlaunch.strategies.mesh.state import restore_state, snapshot_variables
from distlaunch.strategies.predictions import concatenate_batches
from distlaunch.strategies.protocol import BatchHooks, CallResult, Logs, Steps
from distlaunch.strategies.state import State
from distlaunch.strategies.step_times import MEASURE_EVERY, StepTimes
from distlaunch.strategies.variables import (
    host_value,
    logs_to_host,
    metric_results,
    optimizers_of,
    placed_variables,
    slot_variables,
)

COMBINES_SUMS = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
"""Variable by which DTensor sums several tensors over the devices at once.

The last digits of each sum then depend on the tensors beside it, and so on the number of steps of a call.
"""
_STEPS_PER_CHECK = 16  # steps of an evaluation between two checks for a stop request
STEPS_BEFORE_BLOCKS = 1000
"""Number of steps of a process after which it is worth some seconds to compile a call of several steps."""
MOST_OPERATIONS = 500
"""Number of operations of the steps of small models. DTensor needs seconds to compile a thousand operations."""
_LARGE_STATE = 1_000_000_000  # bytes; a call of several steps may need memory for further copies
_MOST_BYTES = 64_000_000  # of the batches of a call of several steps, which are on the devices at the same time
_RESOURCES = (tf.resource, tf.variant)


class DTensorProgram(MeshProgram):
    """Implementation of `Program` on DTensor. The state is on the mesh, and the model's variables give access to it.

    Args:
        layouts: axes of the weights that are split, by path.
        steps, input_axes, peers: see `MeshProgram`.
    """

    def __init__(self, steps: Steps, mesh: Mesh, layouts: Mapping[str, Axes], input_axes: Axes, peers: Peers) -> None:
        super().__init__(steps, {axis: mesh.dim_size(axis) for axis in mesh.dim_names}, input_axes, peers)
        self._mesh, model = mesh, self._model
        self._feed = Feed(mesh, input_axes, peers)
        for optimizer in optimizers_of(model):
            make_functional(optimizer)
        slots = slot_variables(model)
        self._groups = (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            slots,
            list(model.metrics_variables),
        )
        weights = model.weights
        for group in self._groups:
            for variable in group:
                axes = slot_layout(variable, weights, layouts) if group is slots else layouts.get(variable.path, ())
                put_value(variable, MeshVariable(host_value(variable), mesh, axes))
        weights = [*self._groups[0], *self._groups[1]]
        self._local = LocalModel(model, weights, lambda one: value_of(one).whole())
        self._log_names: list[str] | None = None
        self._queue: BatchQueue | None = None
        self._steps_made = 0  # of this process
        self._block_shapes: Shapes | None = None
        """Shapes of the batches of calls with several steps; empty for no such calls, None if that is not decided."""
        self._train_call = MeshFunction(self._train, mesh)
        self._test_call = MeshFunction(self._test, mesh)

    # steps

    def set_train_data(self, source: Source) -> None:
        self._queue = BatchQueue(self._feed.batches(source), may_differ=self._peers.number == 1)
        self._source = source

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        queue, source = self._queue, self._source
        assert queue is not None, "set_train_data comes first"
        assert source is not None
        done, nonfinite, ended, calls = 0, None, False, 0
        seconds, waits, rows_before, began = [], [], self._feed.rows, time.perf_counter()
        while done < num_steps and not (nonfinite and self._steps.stop_at_nonfinite):
            wanted = self._steps_of_call(num_steps - done)
            if not queue:
                # the previous call has ended, so the devices are idle while this process waits for the batches
                asked = time.perf_counter()
                queue.read(wanted)
                waits.append((time.perf_counter() - asked) / max(len(queue), 1))
            batches = queue.take(wanted, self._block_shapes)
            at = self._steps_in_epoch + done
            if ended := self._peers.has_data_ended(source, ended=batches is None, steps=at):
                break
            assert batches is not None, "the data has not ended"
            with _explain_compiler_errors():
                self._find_log_names(batches[0])
                results = self._train_call(tuple(batches))
            calls += 1
            left = num_steps - done - len(batches)
            # in a measured call, the next batches are read only when the devices have finished
            if left and calls % MEASURE_EVERY:
                queue.read(self._steps_of_call(left))  # the devices compute meanwhile
            made, first = self._await(results, batches)
            if nonfinite is None and first is not None:
                nonfinite = done + first
            done += made
            self._steps_made += made
            self._choose_blocks(source, batches)
            now = time.perf_counter()
            seconds += [(now - began) / made] * made
            began = now
        self._steps_in_epoch += done
        times = StepTimes(
            tuple(seconds), _input_s(waits, seconds), (self._feed.rows - rows_before) / self._peers.number
        )
        return CallResult(done, ended, self._train_logs(), self._peers.agree(vote), nonfinite, times)

    def _await(self, results: tf.Tensor, batches: Sequence[Batch]) -> tuple[int, int | None]:
        """Wait for a call, and add its logs.

        Returns:
            The number of steps, and the number of the first one whose losses are not finite.
        """
        values = dtensor.unpack(results)[0].numpy()
        wrong = np.flatnonzero(~np.isfinite(values[:, 0]))
        first = int(wrong[0]) + 1 if wrong.size else None
        if first is not None and len(batches) > 1 and self._steps.stop_at_nonfinite:
            # the call has changed nothing, and no step may follow this one
            for batch in batches[:first]:
                self._await(self._train_call((batch,)), (batch,))
            return first, first
        for _, *own in values:
            for name, value in zip(self._log_names or (), own, strict=True):
                self._sums[name] = self._sums[name] + value if self._steps.logs == "mean" else value
        return len(batches), first

    def _steps_of_call(self, left: int) -> int:
        """Return the number of steps of the next call, of which so many are left."""
        return BLOCK_STEPS if self._block_shapes and left >= BLOCK_STEPS else 1

    def _choose_blocks(self, source: Source, batches: Sequence[Batch]) -> None:
        """Decide once, after some steps, whether calls of several steps are worth their compilation.

        All processes decide the same.

        Args:
            batches: those of the last call.
        """
        if self._block_shapes is not None or self._steps_made < STEPS_BEFORE_BLOCKS:
            return
        shapes = shapes_of(batches[0])
        if any(shape[0] != source.global_batch for shape, _ in shapes):
            return  # the last batch of a pass may be smaller
        state_bytes = sum(_bytes(one.shape, value_of(one).dtype) for group in self._groups for one in group)
        batch_bytes = sum(_bytes(*each) for each in shapes)
        is_small = state_bytes <= _LARGE_STATE and batch_bytes * BLOCK_STEPS <= _MOST_BYTES
        is_quickly_compiled = self._train_call.num_operations(tuple(batches)) <= MOST_OPERATIONS
        has_equal_sums = os.environ.get(COMBINES_SUMS) == "0"
        may = self._may_make_several_steps(source) and is_small and is_quickly_compiled and has_equal_sums
        self._block_shapes = shapes if may else ()

    def skip_warmup(self) -> None:
        self._steps_made = max(self._steps_made, STEPS_BEFORE_BLOCKS)

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        self._model.reset_metrics()
        batches = self._feed.batches(source)
        done, own = 0, {}
        while max_steps is None or done < max_steps:
            if done % _STEPS_PER_CHECK == 0 and self._peers.agree(Vote(stop=should_stop())).stop:
                return None
            batch = next(batches)
            if self._peers.has_data_ended(source, ended=batch is None, steps=done):
                break
            hooked = hooks if hooks is not None and hooks.has(done) else None
            if hooked is not None:
                hooked.begin(done)
            with _explain_compiler_errors():
                own = self._test_call(batch)
            if hooked is not None:
                hooked.end(done, self._test_logs(own))
            done += 1
        return self._test_logs(own)

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        others = self._groups[1]
        # as in Keras, layers may change their variables from batch to batch; the changes are undone at the end
        before = _read(others)
        try:
            return self._predictions(source, should_stop)
        finally:
            for variable, value in zip(others, before, strict=True):
                value_of(variable).on_mesh.assign(value)

    def _predictions(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        call, batches = MeshFunction(self._predict, self._mesh), []
        for batch in self._feed.batches(source):
            if self._peers.has_data_ended(source, ended=batch is None, steps=len(batches)):
                break
            if len(batches) % _STEPS_PER_CHECK == 0 and self.agree(Vote(stop=should_stop())).stop:
                return None
            with _explain_compiler_errors():
                outputs = call(batch)
            batches.append(tf.nest.map_structure(lambda leaf: dtensor.unpack(leaf)[0].numpy(), outputs))
        return concatenate_batches(batches)

    def reset_metrics(self) -> None:
        self._steps_in_epoch = 0
        self._model.reset_metrics()
        self._sums = dict.fromkeys(self._sums, np.float32(0))

    def _train(self, batches: Sequence[Batch]) -> tf.Tensor:
        """Make a step for each batch; return `loss_probe` of its losses and its logs, shape [batches, 1 + logs].

        If there are several batches, and no step may follow losses that are not finite, such losses change nothing.
        """
        before = state = tuple(_read(group) for group in self._groups)
        results, probes = [], []
        for batch in batches:
            if probes:
                state = tuple(_settled(*each) for each in zip(self._groups, before, state, strict=True))
            with _draw_whole_tensors(self._mesh):
                logs, state = self._steps.train(state, batch)
            probes.append(loss_probe(logs))
            values = [tf.reduce_mean(logs[name]) for name in self._log_names or ()]
            results.append(tf.stack([tf.cast(value, tf.float32) for value in (probes[-1], *values)]))
        if len(batches) > 1 and self._steps.stop_at_nonfinite:
            # a sum that overflows is the same to the caller, who then makes the steps one by one
            all_finite = tf.math.is_finite(sum(probes[1:], probes[0]))
            state = tuple(_select(all_finite, new, old) for new, old in zip(state, before, strict=True))
        # at the end, because a read after an assignment may return the old value
        for group, old, new in zip(self._groups, before, state, strict=True):
            assign_new(group, old, new)
        # replicated, so that every device holds the values
        return dtensor.relayout(tf.stack(results), Layout.replicated(self._mesh, rank=2))

    def _test(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Run one step, and return the values that it reports in place of the model's metrics."""
        assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
        trainable, others, _, metrics = self._groups
        state = (_read(trainable), _read(others), _read(metrics))
        with _draw_whole_tensors(self._mesh):
            logs, (_, new_others, new_metrics) = self._steps.test(state, batch)
        assign_new(others, state[1], new_others)
        assign_new(metrics, state[2], new_metrics)
        whole = Layout.replicated(self._mesh, rank=0)
        extra = extra_test_logs(self._model, logs)
        return {name: dtensor.relayout(tf.reduce_mean(value), whole) for name, value in extra.items()}

    def _predict(self, batch: Batch) -> Any:
        trainable, others, _, _ = self._groups
        values = _read(others)
        with _draw_whole_tensors(self._mesh):
            outputs, new = predictions_of(self._model, _read(trainable), values, batch)
        assign_new(others, values, new)
        return tf.nest.map_structure(
            lambda leaf: dtensor.relayout(leaf, Layout.replicated(self._mesh, rank=leaf.shape.rank)), outputs
        )

    def _find_log_names(self, batch: Batch) -> None:
        """Find the names of scalars that the step returns in addition to the model's metrics."""
        if self._log_names is not None:
            return

        def logs(batch: Batch) -> Any:
            return self._steps.train(tuple(_read(group) for group in self._groups), batch)[0]

        def trace() -> Any:
            return tf.function(logs, autograph=False).get_concrete_function(batch).structured_outputs

        self._log_names = extra_log_names(self._steps, trace)
        # after a restore, there are sums
        self._sums = {name: self._sums.get(name, np.float32(0)) for name in self._log_names}

    # metrics

    def _metric_logs(self) -> Logs:
        return logs_to_host(metric_results(self._model))

    def _test_logs(self, own: Mapping[str, Any]) -> Logs:
        # as in Keras, the step's own results for the last batch replace the metrics
        values = {name: dtensor.unpack(value)[0].numpy() for name, value in own.items()}
        return logs_to_host(values) if own else self._metric_logs()

    def _train_logs(self) -> Logs:
        return self._combine_logs(self._metric_logs(), logs_to_host(self._sums))

    # state

    @property
    def is_split(self) -> bool:
        return self._peers.number > 1 and any(any(value_of(one).axes) for one in self._model.variables)

    def finalize(self) -> None:
        # in a graph, values on the mesh can be assigned even if no process holds all parts
        tf.function(lambda: set_final_weights(self._model), autograph=False)()

    def placement(self) -> list[dict[str, Any]]:
        return [value_of(variable).placed(name) for name, variable in placed_variables(self._model).items()]

    def _whole_value(self, variable: Any) -> np.ndarray:
        value: MeshVariable = value_of(variable)
        return value.gathered() if self._peers.number > 1 and any(value.axes) else value.numpy()

    def stored(self) -> dict[str, StoredVariable]:
        """See `StoredProgram.stored`."""
        return {name: value_of(variable).stored() for name, variable in snapshot_variables(self._model).items()}

    def restore(self, state: State) -> None:
        sums, self._steps_in_epoch = restore_state(self._model, state)
        names = self._sums if self._log_names is None else self._log_names
        self._sums = {**dict.fromkeys(names, np.float32(0)), **sums}


def _draw_whole_tensors(mesh: Mesh) -> AbstractContextManager[None]:
    """Draw whole random tensors on each device, in this context.

    The numbers of a split tensor would depend on its layout.
    """

    def whole(tensor: tf.Tensor) -> tf.Tensor:
        return dtensor.relayout(tensor, Layout.replicated(mesh, rank=tensor.shape.rank))

    return change_draws(whole)


def _bytes(shape: Sequence[int], dtype: tf.DType) -> int:
    return math.prod(shape) * dtype.size


def _read(variables: list[Any]) -> list[Any]:
    return [value_of(variable).on_mesh.read_value() for variable in variables]


def assign_new(variables: list[Any], before: list[Any], values: list[Any]) -> None:
    for variable, old, value in zip(variables, before, values, strict=True):
        if value is not old:
            stored = value_of(variable)
            stored.on_mesh.assign(tf.cast(value, stored.dtype))


def _settled(variables: list[Any], before: list[Any], values: list[Any]) -> list[Any]:
    """Return the values of variables after a step, as the next step would read them."""
    stored = [value_of(variable) for variable in variables]
    return [
        old if new is old else dtensor.relayout(tf.cast(new, each.dtype), each.layout)
        for each, old, new in zip(stored, before, values, strict=True)
    ]


def _select(condition: tf.Tensor, values: list[Any], others: list[Any]) -> list[Any]:
    """Return the values if a scalar condition is true, or the others."""

    def select(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        if value is other:
            return value
        # DTensor ends the process if the condition has fewer dimensions
        whole = tf.broadcast_to(condition, value.shape) if value.shape.rank else condition
        return tf.where(whole, value, other)

    return [select(tf.cast(value, other.dtype), other) for value, other in zip(values, others, strict=True)]


@contextlib.contextmanager
def _explain_compiler_errors() -> Iterator[None]:
    """Raise a ConfigError instead of an error of DTensor's compiler about a model that it cannot split."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        # DTensor's compiler names its own source files; other errors of these types come from the model
        if "tensorflow/dtensor/" not in str(error):
            raise
        # such as "'tf.TensorListReserve' op does not implement layout propagation"
        if lacking := re.search(r"'tf\.(\w+)' op does not implement layout propagation", str(error)):
            loop = " (a recurrent layer: use unroll=True)" if "TensorList" in lacking[1] else ""
            message = f"DTensor does not support {lacking[1]}, which this model needs{loop}; use kind: jax, or mirrored"
            raise ConfigError(Problem(("strategy", "kind"), message)) from error
        found = re.search(r"error: (.*)", str(error))
        reason = found[1].strip() if found else str(error).splitlines()[0]
        message = f"DTensor cannot run this model with this layout: {reason}; do not split the layer, or use kind: jax"
        raise ConfigError(Problem(("strategy", "layout"), message)) from error


def _input_s(waits: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the time for which the devices waited for batches in a call, in seconds.

    Args:
        waits: the waits for the first batch of the call, and for those of the other steps that were measured.
        seconds: duration of each step.
    """
    if not waits or not seconds:
        return 0.0
    # the first batch may include the start of the pipeline, so it does not stand for others
    others = waits[1:] or waits
    return min(waits[0] + sum(others) / len(others) * (len(seconds) - 1), sum(seconds))


class MeshFunction:
    """Function of a batch, traced for each shape of batch.

    Tensors on the host that the function captures are copied to the mesh, since DTensor accepts only tiny constants.
    Such tensors are, for instance, tables of layers, statistics passed to `Normalization`, and weights of a loss.
    """

    def __init__(self, function: Callable[[Batch], Any], mesh: Mesh) -> None:
        self._call = tf.function(function, autograph=False, reduce_retracing=False)
        self._mesh = mesh
        self._sizes: dict[Shapes, int] = {}

    def __call__(self, batch: Batch) -> Any:
        key = shapes_of(batch)
        if key not in self._sizes:
            # the call below uses this concrete function
            concrete = self._call.get_concrete_function(batch)
            concrete.set_external_captures([self._on_mesh(tensor) for tensor in concrete.captured_inputs])
            self._sizes[key] = len(concrete.graph.get_operations())
        return self._call(batch)

    def num_operations(self, batch: Batch) -> int:
        """Return the number of operations of the call of a batch with these shapes, which has been called."""
        return self._sizes[shapes_of(batch)]

    def _on_mesh(self, tensor: tf.Tensor) -> tf.Tensor:
        if dtensor.is_dtensor(tensor):
            return tensor
        if tensor.dtype in _RESOURCES:
            message = (
                "DTensor cannot use objects that the model keeps on the host, such as a tf.Variable or a lookup table"
            )
            hint = (
                "make the variable a weight of a layer, move the lookup table into `data.preprocessing`, "
                "or use kind: mirrored"
            )
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; {hint}"))
        return place(tensor, Layout.replicated(self._mesh, rank=tensor.shape.rank))
