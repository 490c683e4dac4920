"""The step functions: Keras's own, the reference step of `loop: custom`, the model's own, or the user's.

Step functions for meshes take the state and return the new one. There, a user's step function has one of two forms.
`step(context, batch)`, which all strategies on TensorFlow accept, assigns variables; its assignments are collected and
take effect at its end. `step(context, state, batch) -> (logs, state)` is the form of Keras on JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.function_references import load_function
from distlaunch.data.user_functions import with_autograph_in_graphs
from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_tape import watched_by_tapes
from distlaunch.strategies.collected_scope import CollectedScope, StateScope
from distlaunch.strategies.mesh.functional_step import FunctionalStep, TestState, TrainState, average, reference_loss
from distlaunch.strategies.protocol import StepFunction, Steps
from distlaunch.strategies.variables import flat_logs, overrides_method, slot_variables
from distlaunch.training.build import can_be_tested
from distlaunch.training.steps.context import (
    StepContext,
    check_not_masked,
    check_reference,
    num_parameters,
    per_example,
)

UserStep = Callable[[StepContext, Batch], dict[str, Any]]
_STEP = ("train", "step")


def reference_step(context: StepContext, batch: Batch) -> dict[str, Any]:
    """Run one training step with explicit sums.

    Compute per-example losses divided by the global batch size, add each replica's share of the regularization, and
    apply one update.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        predictions = context.model(x, training=True)
        check_not_masked(predictions)
        loss = context.average(context.per_example_loss(y, predictions), sample_weight)
        loss += tf.cast(context.regularization(), loss.dtype)
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, predictions, sample_weight)
    return {"loss": loss}


def make_steps(config: RunConfig, model: keras.Model, first_rows: Callable[[int], Batch] | None = None) -> Steps:
    """Return the step functions that the config's loop asks for.

    Args:
        first_rows: returns up to the given number of rows of the training data.
    """
    steps = _steps(config, model)
    test = steps.test if can_be_tested(model) else None
    sample = first_rows and (lambda rows: first_rows(min(rows, config.data.batch)))
    stops, one_by_one = config.train.on_nonfinite == "fail", config.train.steps_per_call == 1
    return dataclasses.replace(steps, test=test, stop_at_nonfinite=stops, one_by_one=one_by_one, sample=sample)


def _steps(config: RunConfig, model: keras.Model) -> Steps:
    if config.strategy.is_functional:
        return _mesh_steps(config, model)
    test = model.test_step
    if config.train.loop == "fit":
        return Steps(model, model.train_step, test)
    context = StepContext(model, per_example(model) if model.compiled else None)
    if config.train.step is None:
        check_reference(model)
        return Steps(model, lambda batch: reference_step(context, batch), test, logs="mean")
    function = load_function(config.train.step, ("train", "step"))
    if num_parameters(function) != 2:
        message = f"got '{config.train.step}', which takes {num_parameters(function)} arguments; expected"
        raise ConfigError(Problem(("train", "step"), f"{message} step(context, batch) under {config.strategy.kind}"))
    # converted by AutoGraph, and not a tf.function, which would be traced for one replica and used by all
    step: UserStep = with_autograph_in_graphs(function)
    return Steps(model, lambda batch: step(context, batch), test, logs="mean", is_own=True)


class FunctionalContext:
    """The context that is passed to a step function `step(context, state, batch) -> (logs, state)`.

    Attributes:
        model: the Keras model; `model.stateless_call` computes its outputs.
        optimizer: the model's optimizer; `optimizer.stateless_apply` returns the updated variables.
        per_example_loss: function (y, predictions) that returns the config's loss without reduction, times its
            `loss_weights`; shape [rows] or [rows, ...].
        average: function (per_example, sample_weight=None) that returns the mean over the rows of the global batch.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model: Any = model
        self.optimizer: Any = model.optimizer
        self.per_example_loss = StepContext(model, per_example(model)).per_example_loss
        self.average = average


class _DenseGradients(StepContext):
    """Step context with dense gradients, because DTensor does not support sparse updates."""

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> list[Any]:
        found = super().gradients(tape, loss, variables)
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]


def _mesh_steps(config: RunConfig, model: keras.Model) -> Steps:
    """Return the step functions for a mesh.

    Raises:
        ConfigError: the model or the step cannot run on a mesh.
    """
    if not model.compiled:
        message = "missing: on a mesh, Keras's training step needs an optimizer and a loss"
        raise ConfigError(Problem(("compile",), message))
    in_place = config.strategy.changes_in_place
    if config.train.loop == "fit":
        step = FunctionalStep(model)
        train = _overridden_step(model, "train_step", in_place) or step.train_step
        return Steps(model, train, _overridden_step(model, "test_step", in_place) or step.test_step)
    if config.train.step is not None:
        return Steps(
            model, _load_user_step(config.train.step, model, in_place), FunctionalStep(model).test_step, logs="mean"
        )
    context = StepContext(model, per_example(model))
    check_reference(model)

    def loss_of(y: Any, predictions: Any) -> Any:
        check_not_masked(predictions)
        return context.per_example_loss(y, predictions)

    step = FunctionalStep(model, reference_loss(model, loss_of))
    return Steps(model, step.train_step, step.test_step, logs="mean")


def _load_user_step(reference: str, model: keras.Model, in_place: bool) -> StepFunction:
    function = load_function(reference, _STEP)
    if num_parameters(function) == 3:
        functional = FunctionalContext(model)
        return _with_flat_logs(lambda state, batch: function(functional, state, batch))
    if not in_place:
        message = f"got '{reference}', a step(context, batch), which assigns variables; on JAX it must have the form"
        raise ConfigError(Problem(_STEP, f"{message} step(context, state, batch) -> (logs, state)"))
    # converted here, because the program traces its steps without AutoGraph
    context, step = _DenseGradients(model, per_example(model)), tf.autograph.to_graph(function)
    return _collect_assignments(model, lambda batch: step(context, batch))


def _collect_assignments(model: keras.Model, step: Callable[[Batch], dict[str, Any]]) -> StepFunction:
    """Return a functional step that runs a step with assignments, and returns the assigned values as the new state."""

    def train_step(state: TrainState, batch: Batch) -> tuple[dict[str, Any], TrainState]:
        slots = slot_variables(model)
        groups = (model.trainable_variables, model.non_trainable_variables, slots, model.metrics_variables)
        # an evaluation has no optimizer state, but None
        known = [(group, values) for group, values in zip(groups, state, strict=True) if values is not None]
        given = itertools.chain.from_iterable(zip(group, values, strict=True) for group, values in known)
        scope = StateScope(given)
        with scope, watched_by_tapes(lambda: scope.differentiable(groups[0])):
            logs = flat_logs(step(batch))
        new = [values and _new_values(scope, group, values) for group, values in zip(groups, state, strict=True)]
        return logs, (new[0], new[1], new[2], new[3])

    return train_step


def _new_values(scope: CollectedScope, variables: list[Any], before: list[Any]) -> list[Any]:
    """Return the variables' values at the end of a scope; unassigned variables keep their values."""
    assigned = [scope.assigned(variable) for variable in variables]
    return [old if new is None else new for new, old in zip(assigned, before, strict=True)]


def _overridden_step(model: keras.Model, name: str, in_place: bool) -> StepFunction | None:
    """Return the model's own `train_step` or `test_step` as a functional step, or None if it has Keras's."""
    if not overrides_method(model, name):
        return None
    own = getattr(model, name)
    if num_parameters(own) == 2:
        return _with_flat_logs(own)
    if not in_place:
        what = f"{type(model).__name__}.{name}(self, data)"
        message = f"{what} assigns variables; on JAX it must have the form {name}(self, state, data) -> logs, state"
        raise ConfigError(Problem(("model", "function"), f"{message}; change it, or use another strategy"))
    collecting = _collect_assignments(model, own)
    return collecting if name == "train_step" else _without_slots(collecting)


def _with_flat_logs(step: StepFunction) -> StepFunction:
    """Return a functional step whose logs are flat, as Keras reports them."""

    def flat(state: Any, batch: Batch) -> tuple[dict[str, Any], Any]:
        logs, state = step(state, batch)
        return flat_logs(logs), state

    return flat


def _without_slots(step: StepFunction) -> StepFunction:
    """Return an evaluation step, whose state has no optimizer variables, from a step whose state has them."""

    def test_step(state: TestState, batch: Batch) -> tuple[dict[str, Any], TestState]:
        trainable, others, metrics = state
        logs, (trainable, others, _, metrics) = step((trainable, others, None, metrics), batch)
        return logs, (trainable, others, metrics)

    return test_step
