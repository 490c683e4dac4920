"""Training and evaluation on a mesh of JAX devices: functional steps, compiled once for each shape of batch.

A last batch that is smaller than the others is not padded. It is compiled for its own shape. XLA splits it unevenly or,
on meshes of several axes, computes it whole on every device. Padding rows with weight zero would count in unweighted
metrics, in BatchNorm's statistics and in losses that a layer adds, and would change dropout masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.plural import listed
from distlaunch.data.batches import Source
from distlaunch.patches.jax_partitioning import computed_exactly
from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.final_weights import set_final_weights
from distlaunch.strategies.finite import loss_probe
from distlaunch.strategies.jax.feed import Feed, Placement, StepClock, place
from distlaunch.strategies.jax.keras_backend import draw_like_tensorflow
from distlaunch.strategies.jax.operation_checks import OperationChecks
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
from distlaunch.strategies.variables import logs_to_host, metric_results

_IN_FLIGHT = 2  # steps that may be in progress: more than one keeps the devices busy, and a small number limits memory
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
        self._local = LocalModel(self._model, weights, self._values.local_copy, jnp.asarray)
        self._feed: Feed | None = None
        self._clock = StepClock()
        self._train_call: Callable[..., Any] | None = None
        self._test_call: Callable[..., Any] | None = None
        self._result = jax.jit(self._metrics_result, out_shardings=self._whole)

    # steps

    def set_train_data(self, source: Source) -> None:
        self._feed, self._source = Feed(source, self._placement, self._peers), source

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        feed, source = self._feed, self._source
        assert feed is not None, "set_train_data comes first"
        assert source is not None
        state, done, running, notes = self._values.read(), 0, deque(), []
        nonfinite, ended = None, False
        self._clock.begin(feed)
        while done < num_steps and not (nonfinite and self._steps.stop_at_nonfinite):
            batch = feed.take()
            at = self._steps_in_epoch + done
            if ended := self._peers.has_data_ended(source, ended=batch is None, steps=at):
                break
            if self._train_call is None:
                self._train_call, notes = self._checked_train_call(state, batch)
            state, self._sums, probe = self._train_call(state, self._sums, batch)
            self._clock.load_ahead(feed, probe)
            done += 1
            running.append((done, probe))
            if len(running) > _IN_FLIGHT:
                nonfinite = nonfinite or _step_if_nonfinite(*running.popleft())
                self._clock.step_ended()
        # necessary, because the variables' previous values were donated to the first step
        self._values.assign(state)
        self._steps_in_epoch += done
        agreed = self._peers.agree(vote)  # while the devices compute
        for step, probe in running:
            nonfinite = nonfinite or _step_if_nonfinite(step, probe)
            self._clock.step_ended()
        times = self._clock.times(feed, self._peers.number)
        return CallResult(done, ended, self._train_logs(state), agreed, nonfinite, times, notes)

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
        call, batches = jax.jit(draw_like_tensorflow(step), out_shardings=(self._whole, self._values.shardings[1])), []
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

    def _checked_train_call(self, state: TrainState, batch: Any) -> tuple[Callable[..., Any], list[str]]:
        """Return the step and notes for the user, after a check of the step's operations on this mesh.

        Raises:
            ConfigError: an operation is computed incorrectly, and there is no other way to compute it.
        """
        call = self._make_train_call(state, batch)
        if self._mesh.size == 1:
            return call, []
        step = call.trace(state, self._sums, batch)
        checks = OperationChecks(self._mesh, self._placement.axes, self._values.kernel_layouts(), self._peers)
        operations = checks.operations(step.jaxpr)
        if not operations:
            return call, []
        remedies = self._placement.remedies_for(batch), self._placement.all_remedies
        with ThreadPoolExecutor(1) as pool:
            checked = pool.submit(checks.check, operations, *remedies)
            step.lower().compile()  # the first call reuses it
        if not (wrong := checked.result()):
            return call, []
        self._placement.apply_all_remedies()
        layers = listed([f"'{each.layer}'" for each in wrong])
        note = f"JAX {jax.__version__} computes {layers} incorrectly on this mesh, so another method is used"
        return self._make_train_call(state, batch), [note]

    def _make_train_call(self, state: TrainState, batch: Any) -> Any:
        step, average = draw_like_tensorflow(self._steps.train), self._steps.logs == "mean"
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

        shardings = (self._values.shardings, self._whole, self._whole)
        # donated, so that the new state reuses the memory of the old state
        return jax.jit(call, donate_argnums=(0, 1), out_shardings=shardings)

    def _make_test_call(self) -> Callable[..., Any]:
        assert self._steps.test is not None, "the loop asks for evaluation only where there is a test step"
        step, shardings = draw_like_tensorflow(self._steps.test), self._values.shardings

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


def _step_if_nonfinite(step: int, probe: jax.Array) -> int | None:
    """Wait for a step, and return its number if its losses are not finite, else None.

    Args:
        probe: result of `loss_probe` for the step.
    """
    return None if np.isfinite(np.asarray(probe)) else step
