"""Training and evaluation on a mesh of JAX devices: functional steps, compiled once for each shape of batch.

Several steps are made in one call where that is faster; see `step_loop`.

A last batch that is smaller than the others is not padded. It is compiled for its own shape. XLA splits it unevenly or,
on meshes of several axes, computes it whole on every device. Padding rows with weight zero would count in unweighted
metrics, in BatchNorm's statistics and in losses that a layer adds, and would change dropout masks.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.plural import listed
from distlaunch.data.batches import Source
from distlaunch.patches.jax_partitioning import computed_exactly
from distlaunch.patches.keras_private import resolve_decay_exclusions
from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.final_weights import set_final_weights
from distlaunch.strategies.finite import loss_probe
from distlaunch.strategies.jax.feed import Feed, Group, Placement, StepClock, place, to_jax_arrays
from distlaunch.strategies.jax.keras_backend import compute_like_tensorflow
from distlaunch.strategies.jax.operation_checks import OperationChecks
from distlaunch.strategies.jax.step_loop import Step, choose_slots, looped, stacked_spec
from distlaunch.strategies.jax.values import Values
from distlaunch.strategies.local_model import LocalModel
from distlaunch.strategies.mesh.functional_step import (
    TrainState,
    extra_log_names,
    extra_test_logs,
    predictions_of,
)
from distlaunch.strategies.mesh.layout import Axes
from distlaunch.strategies.mesh.parts import StoredVariable
from distlaunch.strategies.mesh.program import MeshProgram
from distlaunch.strategies.mesh.state import restore_state
from distlaunch.strategies.predictions import concatenate_batches
from distlaunch.strategies.protocol import BatchHooks, CallResult, Logs, Steps
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import logs_to_host, metric_results, optimizers_of, with_wrapped_optimizers

_IN_FLIGHT = 2  # calls that may be in progress: more than one keeps the devices busy, and a small number limits memory
_STEPS_PER_CHECK = 16  # steps of an evaluation between two checks for a stop request


class JaxProgram(MeshProgram):
    """Implementation of `Program` on JAX. Between calls, the state is in the model's variables, split by their layouts.

    Args:
        layouts: axes of the weights that are split, by path.
        steps, input_axes, peers: see `MeshProgram`.
    """

    def __init__(self, steps: Steps, mesh: Mesh, layouts: Mapping[str, Axes], input_axes: Axes, peers: Peers) -> None:
        super().__init__(steps, mesh.shape, input_axes, peers)
        self._mesh = mesh
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._placement = Placement(mesh, input_axes)
        self._values = Values(self._model, mesh, layouts, peers)
        weights = [*self._values.groups[0], *self._values.groups[1]]
        for optimizer in itertools.chain.from_iterable(map(with_wrapped_optimizers, optimizers_of(self._model))):
            # on TensorFlow, the names of variables have those of their layers
            resolve_decay_exclusions(optimizer, key=id, name=lambda variable: variable.path)
        self._local = LocalModel(self._model, weights, self._values.local_copy, jnp.asarray)
        self._feed: Feed | None = None
        self._clock = StepClock()
        self._train_call: Callable[..., Any] | None = None
        self._loop_call: Callable[..., Any] | None = None
        """Makes the steps of stacked batches; None if each step is a call of its own."""
        self.num_slots, self._stacked = 1, None
        """Number of batches that are stacked, and their types."""
        self._true = place(np.array(True), self._whole)
        self._test_call: Callable[..., Any] | None = None
        self._result = jax.jit(self._metrics_result, out_shardings=self._whole)

    # steps

    def set_train_data(self, source: Source) -> None:
        self._feed, self._source = Feed(source, self._placement, self._peers), source
        if self._loop_call is not None:
            self._feed.stack(self.num_slots, self._stacked)

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        feed, source = self._feed, self._source
        assert feed is not None, "set_train_data comes first"
        assert source is not None
        state, done, notes = self._values.read(), 0, []
        running: deque[_Running] = deque()
        nonfinite, ended, goes_on = None, False, self._true
        self._clock.begin(feed)
        try:
            while done < num_steps and not (nonfinite and self._steps.stop_at_nonfinite):
                if self._train_call is None and (spec := feed.next_spec()) is not None:
                    notes = self._prepare_training(state, spec)
                    if self._loop_call is not None:
                        feed.stack(self.num_slots, self._stacked)
                group = feed.take_group(num_steps - done)
                at = self._steps_in_epoch + done
                if ended := self._peers.has_data_ended(source, ended=group is None, steps=at):
                    break
                assert group is not None, "the data has not ended"
                if group.is_stacked:
                    assert self._loop_call is not None, "batches are stacked for it"
                    places = group.first, group.first + group.number
                    state, self._sums, probe, goes_on = self._loop_call(
                        state, self._sums, goes_on, group.batches, *places
                    )
                else:
                    if self._train_call is None:  # the rows are process-local
                        notes = self._prepare_training(state, group.batches)
                    assert self._train_call is not None, "set just now"
                    state, self._sums, probe = self._train_call(state, self._sums, group.batches)
                running.append(_Running(done, group, probe))
                done += group.number
                self._clock.load_ahead(feed, probe, num_steps - done or num_steps)
                if len(running) > _IN_FLIGHT:
                    first = self._await(running.popleft())
                    nonfinite = nonfinite or first
        finally:
            # also after an error, because the variables' previous values were donated to the first step
            self._values.assign(state)
        agreed = self._peers.agree(vote)  # while the devices compute
        for each in running:
            if nonfinite and self._steps.stop_at_nonfinite:
                break  # no later step counts
            first = self._await(each)
            nonfinite = nonfinite or first
        if nonfinite and self._steps.stop_at_nonfinite and self._loop_call is not None:
            done = nonfinite  # the loop made no further steps
        self._steps_in_epoch += done
        times = self._clock.times(feed, self._peers.number)
        return CallResult(done, ended, self._train_logs(state), agreed, nonfinite, times, notes)

    def _await(self, running: _Running) -> int | None:
        """Wait for steps, and return the number of the first one whose losses are not finite, or None."""
        group = running.group
        probes = np.atleast_1d(np.asarray(running.probe))[group.first : group.first + group.number]
        self._clock.steps_ended(group.number)
        wrong = np.flatnonzero(~np.isfinite(probes))
        return running.before + int(wrong[0]) + 1 if wrong.size else None

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        self._model.reset_metrics()
        feed = Feed(source, self._placement, self._peers)
        trainable, others, slots, metrics = self._values.read()
        done, stopped, own = 0, False, {}
        while max_steps is None or done < max_steps:
            stopped = done % _STEPS_PER_CHECK == 0 and self._peers.agree(Vote(stop=should_stop())).stop
            if stopped or self._peers.has_data_ended(source, ended=(batch := feed.take()) is None, steps=done):
                break
            if self._test_call is None:
                self._test_call = self._make_test_call()
            hooked = hooks if hooks is not None and hooks.has(done) else None
            if hooked is not None:
                hooked.begin(done)
            others, metrics, own = self._test_call(trainable, others, metrics, batch)
            if hooked is not None:
                hooked.end(done, logs_to_host(own or self._result(metrics)))
            done += 1
            if done != max_steps:
                feed.load_ahead()
            if done % _IN_FLIGHT == 0:
                # without a wait, Python would start all steps at once, and their batches would fill the memory
                jax.block_until_ready(metrics)
        # even if stopped, because the previous values were donated
        self._values.assign((trainable, others, slots, metrics))
        # as in Keras, the step's own results for the last batch replace the metrics
        return None if stopped else logs_to_host(own or self._result(metrics))

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        feed, (trainable, others, _, _) = Feed(source, self._placement, self._peers), self._values.read()

        def step(trainable: Any, others: Any, batch: Any) -> Any:
            with computed_exactly(self._placement.remedies_for(batch)):
                return predictions_of(self._model, trainable, others, batch)

        # as in Keras, layers may change their variables from batch to batch; the changes are dropped at the end
        call = jax.jit(compute_like_tensorflow(step), out_shardings=(self._whole, self._values.shardings[1]))
        batches = []
        while not self._peers.has_data_ended(source, ended=(batch := feed.take()) is None, steps=len(batches)):
            if len(batches) % _STEPS_PER_CHECK == 0 and self.agree(Vote(stop=should_stop())).stop:
                return None
            outputs, others = call(trainable, others, batch)
            feed.load_ahead()
            batches.append(keras.tree.map_structure(np.asarray, outputs))
        return concatenate_batches(batches)

    def reset_metrics(self) -> None:
        self._steps_in_epoch = 0
        self._model.reset_metrics()
        self._sums = self._zeros(self._sums)

    def _prepare_training(self, state: TrainState, batch: Any) -> list[str]:
        """Make the calls that train; return notes for the user, after a check of the step's operations on this mesh.

        Args:
            batch: the first batch, or its types.

        Raises:
            ConfigError: an operation is computed incorrectly, and there is no other way to compute it.
        """
        step, compiled_ahead = self._make_train_calls(state, batch)
        if self._mesh.size == 1:
            return []
        checks = OperationChecks(self._mesh, self._placement.axes, self._values.kernel_layouts(), self._peers)
        operations = checks.operations(step.jaxpr)
        if not operations:
            return []
        remedies = self._placement.remedies_for(batch), self._placement.all_remedies
        with ThreadPoolExecutor(1) as pool:
            checked = pool.submit(checks.check, operations, *remedies)
            compiled_ahead.lower().compile()  # the first call reuses it
        if not (wrong := checked.result()):
            return []
        self._placement.apply_all_remedies()
        self._make_train_calls(state, batch)
        layers = listed([f"'{each.layer}'" for each in wrong])
        return [f"JAX {jax.__version__} computes {layers} incorrectly on this mesh, so another method is used"]

    def _make_train_calls(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """Make the call of one step and, where they are faster, calls of several steps.

        Returns:
            The traced call of one step, and the traced call that is needed first.
        """
        call = self._train_call_function(state, batch)
        shardings = (self._values.shardings, self._whole, self._whole)
        # donated, so that the new state reuses the memory of the old state
        self._train_call = jax.jit(call, donate_argnums=(0, 1), out_shardings=shardings)
        self._loop_call = None
        traced = self._train_call.trace(state, self._sums, batch)
        full = self._full_batch_spec()
        if full is None:
            return traced, traced
        platform = self._mesh.devices.flat[0].platform
        self.num_slots, self._stacked = choose_slots(traced, state, self._sums, full, platform), full
        if self.num_slots == 1:
            return traced, traced
        # the same function, so that JAX does not trace the step again
        step = jax.jit(call, out_shardings=shardings)
        loop = looped(step, self._placement.constrained, stops=self._steps.stop_at_nonfinite)
        self._loop_call = jax.jit(loop, donate_argnums=(0, 1), out_shardings=(*shardings, self._whole))
        if [leaf.shape for leaf in jax.tree.leaves(batch)] != [leaf.shape for leaf in jax.tree.leaves(full)]:
            return traced, traced
        stacked = jax.tree.map(functools.partial(stacked_spec, slots=self.num_slots), batch)
        return traced, self._loop_call.trace(state, self._sums, self._true, stacked, 0, 1)

    def _full_batch_spec(self) -> Any:
        """Return the types of a global batch with all its rows; None if batches are not stacked.

        Only such batches are stacked. So the shape of a batch decides how its step is computed, also after a resume.
        """
        source = self._source
        assert source is not None, "set_train_data comes first"
        if not self._may_make_several_steps(source) or self._steps.sample is None or source.global_batch is None:
            return None
        return self._placement.spec(to_jax_arrays(self._steps.sample(1)), source.global_batch)

    def _train_call_function(self, state: TrainState, batch: Any) -> Step:
        step, average = compute_like_tensorflow(self._steps.train), self._steps.logs == "mean"
        # `eval_shape` finds the names without compiling or computing anything
        names = extra_log_names(self._steps, lambda: jax.eval_shape(self._steps.train, state, batch)[0])
        if set(self._sums) != set(names):
            self._sums = {**self._zeros(names), **{name: self._sums[name] for name in names if name in self._sums}}

        def call(state: TrainState, sums: dict[str, Any], batch: Any) -> Any:
            with computed_exactly(self._placement.remedies_for(batch)):
                logs, state = step(state, batch)
            values = {name: jnp.mean(logs[name]).astype(jnp.float32) for name in names}
            sums = {name: sums[name] + value for name, value in values.items()} if average else values
            return state, sums, loss_probe(logs)

        return call

    def _make_test_call(self) -> Callable[..., Any]:
        assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
        step, shardings = compute_like_tensorflow(self._steps.test), self._values.shardings

        def call(trainable: Any, others: Any, metrics: Any, batch: Any) -> Any:
            with computed_exactly(self._placement.remedies_for(batch)):
                logs, (_, others, metrics) = step((trainable, others, metrics), batch)
            own = {name: jnp.mean(value) for name, value in extra_test_logs(self._model, logs).items()}
            return others, metrics, own

        return jax.jit(call, donate_argnums=(1, 2), out_shardings=(shardings[1], shardings[3], self._whole))

    # metrics

    def _metrics_result(self, metrics: list[Any]) -> dict[str, Any]:
        with keras.StatelessScope(state_mapping=list(zip(self._values.groups[3], metrics, strict=True))):
            # converted here, because a result may be the variable itself, which has another value outside the scope
            return {name: jnp.asarray(value) for name, value in metric_results(self._model).items()}

    def _train_logs(self, state: TrainState) -> Logs:
        return self._combine_logs(logs_to_host(self._result(state[3])), logs_to_host(self._sums))

    def _zeros(self, names: Any) -> dict[str, Any]:
        return {name: place(np.zeros((), np.float32), self._whole) for name in names}

    # state

    @property
    def is_split(self) -> bool:
        return any(self._values.local_copy(one) is None for one in self._model.variables)

    def finalize(self) -> None:
        set_final_weights(self._model)
        self._values.assign(self._values.read())

    def placement(self) -> list[dict[str, Any]]:
        return self._values.placement()

    def _whole_value(self, variable: Any) -> np.ndarray:
        return self._values.copy(variable)

    def stored(self) -> dict[str, StoredVariable]:
        """See `StoredProgram.stored`."""
        return self._values.stored()

    def restore(self, state: State) -> None:
        sums, self._steps_in_epoch = restore_state(self._model, state, self._values.put)
        placed = {name: place(value, self._whole) for name, value in sums.items()}
        # a compiled step has a sum for each of its logs
        self._sums = {**self._zeros(self._sums or {}), **placed}
        self._values.assign(self._values.read())


class _Running(NamedTuple):
    """Steps that the devices may not have finished.

    Attributes:
        before: number of steps of the call before them.
        probe: result of `loss_probe`, for each slot if the batches are stacked.
    """

    before: int
    group: Group
    probe: jax.Array
