"""Functional steps, which take the old state and return the new one without assigning anything.

Keras's own JAX trainer has such steps. The steps here behave like Keras on TensorFlow where the two backends differ;
for example, metrics also receive the masks of predictions. They also support `loop: custom`. They have Keras's
signatures, so that a model's own `train_step(state, data)` can replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops, tree

from distlaunch.data.batches import Batch
from distlaunch.patches.keras_logits_on_jax import are_logits_used, logits_of, put_logits
from distlaunch.patches.keras_loss_trackers import average_over_batches
from distlaunch.patches.keras_private import (
    call_takes_training,
    compute_loss,
    loss_tracker,
    mask_of,
    put_mask,
)
from distlaunch.strategies.protocol import Steps
from distlaunch.strategies.variables import flat_logs, metric_results, overrides_method

Values = list[Any]
TrainState = tuple[Values, Values, Values, Values]
"""Values of the trainable, the other, the optimizer's and the metrics' variables, as in Keras on JAX."""
TestState = tuple[Values, Values, Values]
"""Values of the trainable, the other and the metrics' variables."""
FunctionalLogs = dict[str, Any]
LossOf = Callable[[Any, Any, Any, Any], Any]
"""Function of (x, y, predictions, sample_weight) that returns the loss of the global batch."""


class FunctionalStep:
    """A training step and an evaluation step of a compiled model as pure functions.

    Args:
        loss: the loss to minimize; None for the compiled loss, as in `fit`, whose mean is the metric `loss`.

    Attributes:
        differs_from_jax: whether Keras's own step on JAX computes something else, which is known once `train_step` was
            called: a layer assigns a trainable weight, the loss does not depend on a weight, or a metric is computed
            from logits.
    """

    def __init__(self, model: keras.Model, loss: LossOf | None = None) -> None:
        self._model, self._custom_loss = model, loss
        self.differs_from_jax = False
        average_over_batches(model)

    def train_step(self, state: TrainState, data: Batch) -> tuple[FunctionalLogs, TrainState]:
        """Return the logs of a training step, and the new state."""
        trainable, others, slots, metrics = state
        number = len(self._model.optimizer.variables)
        slots, unused = slots[:number], slots[number:]  # `unused` belongs to optimizers other than the compiled one
        model, optimizer = self._model, self._model.optimizer

        def loss_of(trainable: Values) -> Any:
            scaling = zip(optimizer.variables, slots, strict=True)  # includes the factor of a LossScaleOptimizer
            with self._training_scope((trainable, others, metrics), scaling) as scope:
                loss, predictions = self._forward(data, training=True)
                # in float16, unscaled gradients would underflow; `apply` divides them by the same factor
                scaled = optimizer.scale_loss(loss)
            # attributes of tensors, which are lost because differentiation returns new tensors
            attributes = [(mask_of(leaf), logits_of(leaf)) for leaf in tree.flatten(predictions)]
            # TensorFlow would sum a loss with one value per row, and JAX would raise an error
            scaled = ops.sum(scaled) if ops.ndim(scaled) else scaled
            return scaled, (loss, predictions, attributes, scope.assigned, *self._others_and_metrics(scope))

        (_, aux), gradients = _value_and_grad(loss_of)(trainable)
        loss, predictions, attributes, assigned, others, metrics = aux
        _set_attributes(predictions, attributes)
        trainable = [assigned.get(index, value) for index, value in enumerate(trainable)]
        trainable, slots = _apply(optimizer, gradients, model.trainable_variables, trainable, slots)
        tracked = loss if self._custom_loss is None else None
        logs, others, metrics = self._update_metrics((trainable, others, metrics), data, predictions, tracked)
        uses_logits = any(are_logits_used(leaf) for leaf in tree.flatten(predictions))
        self.differs_from_jax = bool(assigned) or any(gradient is None for gradient in gradients) or uses_logits
        if self._custom_loss is not None:
            # `loop: custom` reports its own loss under every strategy
            logs = {"loss": loss}
        return logs, (trainable, others, [*slots, *unused], metrics)

    def test_step(self, state: TestState, data: Batch) -> tuple[FunctionalLogs, TestState]:
        """Return the logs of an evaluation step, and the new state."""
        trainable, others, metrics = state
        with self._scope((trainable, others, metrics)) as scope:
            loss, predictions = self._forward(data, training=False)
        others, metrics = self._others_and_metrics(scope)
        logs, others, metrics = self._update_metrics((trainable, others, metrics), data, predictions, loss)
        return logs, (trainable, others, metrics)

    def _forward(self, data: Batch, *, training: bool) -> tuple[Any, Any]:
        """Return the loss and the predictions; call this within a stateless scope."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        arguments = {"training": training} if call_takes_training(model) else {}
        predictions = model(x, **arguments)
        if training and self._custom_loss is not None:
            return self._custom_loss(x, y, predictions, sample_weight), predictions
        return compute_loss(model, x, y, predictions, sample_weight, training=training), predictions

    def _update_metrics(self, state: TestState, data: Batch, predictions: Any, loss: Any) -> Any:
        """Return the logs, and the new values of the non-trainable variables and the metrics.

        Args:
            loss: the loss to track, or None.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        rows = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
        with self._scope(state) as scope:
            if loss is not None:
                loss_tracker(self._model).update_state(loss, sample_weight=rows)
            logs = flat_logs(self._model.compute_metrics(x, y, predictions, sample_weight))
        return logs, *self._others_and_metrics(scope)

    def _scope(self, state: TestState) -> keras.StatelessScope:
        return keras.StatelessScope(state_mapping=self._mapping(state), collect_losses=True)

    def _training_scope(self, state: TestState, more: Any) -> _TrainingScope:
        return _TrainingScope(self._model.trainable_variables, [*self._mapping(state), *more])

    def _mapping(self, state: TestState) -> list[tuple[Any, Any]]:
        model = self._model
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        pairs = (zip(group, values, strict=True) for group, values in zip(groups, state, strict=True))
        return [pair for group in pairs for pair in group]

    def _others_and_metrics(self, scope: keras.StatelessScope) -> tuple[Values, Values]:
        return _values(scope, self._model.non_trainable_variables), _values(scope, self._model.metrics_variables)


class _TrainingScope(keras.StatelessScope):
    """Scope of a forward pass in training, in which layers may assign trainable variables.

    `SpectralNormalization` does that. As on TensorFlow, the loss then depends on the assigned value, and the gradient
    with respect to this value belongs to the variable.

    Attributes:
        assigned: the last assigned values of trainable variables, by the index of the variable.
    """

    def __init__(self, trainable: Sequence[Any], mapping: list[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self._indices = {id(variable): index for index, variable in enumerate(trainable)}
        self._given = [value for variable, value in mapping if id(variable) in self._indices]
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        index = self._indices.get(id(variable))
        if index is not None:
            given = self._given[index]
            value = self.assigned[index] = ops.stop_gradient(value) + (given - ops.stop_gradient(given))
        super().add_update((variable, value))


def predictions_of(model: keras.Model, trainable: Values, others: Values, batch: Batch) -> tuple[Any, Values]:
    """Predict with these values of the model's variables, by the model's `predict_step`.

    Returns:
        The predictions, and new values of the non-trainable variables, which layers may change in predictions too.
    """
    # on JAX, Keras's `predict_step` takes the state
    if keras.backend.backend() == "jax":
        return model.predict_step((trainable, others), batch)
    groups = ((model.trainable_variables, trainable), (model.non_trainable_variables, others))
    mapping = [pair for variables, values in groups for pair in zip(variables, values, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        predictions = model.predict_step(batch)
    return predictions, _values(scope, model.non_trainable_variables)


def extra_log_names(steps: Steps, trace: Callable[[], Iterable[str]]) -> list[str]:
    """Return the names of the scalars that a training step returns; empty if they are just the model's metrics.

    Args:
        trace: returns the names of all scalars; called only if they are not known without a trace.
    """
    if isinstance(getattr(steps.train, "__self__", None), FunctionalStep):
        if steps.logs == "mean":
            return ["loss"]
        if not overrides_method(steps.model, "compute_metrics"):
            return []
    logs = list(trace())
    is_reported = steps.logs == "last" and set(logs) == set(metric_results(steps.model))
    return [] if is_reported else sorted(logs)


def extra_test_logs(model: keras.Model, logs: FunctionalLogs) -> FunctionalLogs:
    """Return the logs of an evaluation step that replace the model's metrics; empty if they are the metrics."""
    return {} if set(logs) == set(metric_results(model)) else logs


def reference_loss(model: keras.Model, per_example: Callable[[Any, Any], Any]) -> LossOf:
    """Return the loss that `loop: custom` uses if the config names no step function.

    It is the mean over the global batch plus the regularization.
    """

    def loss(x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
        total = average(per_example(y, predictions), sample_weight)
        for added in model.losses:
            # a layer may add one value for each row; Keras sums them
            total += ops.cast(ops.sum(added), total.dtype)
        return total

    return loss


def average(per_example: Any, sample_weight: Any = None) -> Any:
    """Return the mean over the rows of the global batch.

    Args:
        per_example: shape [rows] or [rows, ...]; further dimensions are averaged.
        sample_weight: shape [rows], or a weight for each value of `per_example`.
    """
    if sample_weight is not None and len(sample_weight.shape) == len(per_example.shape):
        per_example, sample_weight = per_example * ops.cast(sample_weight, per_example.dtype), None
    if len(per_example.shape) > 1:
        per_example = ops.mean(per_example, axis=tuple(range(1, len(per_example.shape))))
    if sample_weight is not None:
        per_example = per_example * ops.cast(ops.reshape(sample_weight, per_example.shape), per_example.dtype)
    # on a mesh, a step gets all rows of the global batch
    return ops.sum(per_example) / per_example.shape[0]


def _apply(
    optimizer: Any, gradients: Values, variables: Sequence[Any], trainable: Values, slots: Values
) -> tuple[Values, Values]:
    """Apply the optimizer, and return the new values of the variables and of the optimizer's variables."""
    if keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # `apply` assigns within branches of a condition, and on JAX these values cannot be used outside
        applied: Any = optimizer.stateless_apply(slots, gradients, trainable)
        return applied
    mapping = [*zip(variables, trainable, strict=True), *zip(optimizer.variables, slots, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply(gradients, variables)
    return _values(scope, variables), _values(scope, optimizer.variables)


def _value_and_grad(function: Callable[[Values], Any]) -> Callable[[Values], Any]:
    """Return a function that computes value and gradients of a function that returns (loss, auxiliary values).

    The gradient of a value that the loss does not depend on is None.
    """
    if keras.backend.backend() == "tensorflow":
        return _value_and_grad_by_tape(function)
    return _value_and_grad_on_jax(function)


def _value_and_grad_on_jax(function: Callable[[Values], Any]) -> Callable[[Values], Any]:
    import jax
    from jax.custom_derivatives import SymbolicZero

    def differentiate(values: Values) -> Any:
        connected: set[int] = set()

        @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
        def noticed(index: int, value: Any) -> Any:
            return value

        def backward(index: int, _: None, gradient: Any) -> tuple[Any]:
            if isinstance(gradient, SymbolicZero):
                return (ops.zeros(gradient.shape, gradient.dtype),)
            connected.add(index)
            return (gradient,)

        noticed.defvjp(lambda index, value: (value.value, None), backward, symbolic_zeros=True)

        def from_noticed(values: Values) -> Any:
            return function([noticed(index, value) for index, value in enumerate(values)])

        found, gradients = jax.value_and_grad(from_noticed, has_aux=True)(values)
        # None instead of zeros, as TensorFlow returns: optimizers do not decay these weights
        return found, [gradient if index in connected else None for index, gradient in enumerate(gradients)]

    return differentiate


def _value_and_grad_by_tape(function: Callable[[Values], Any]) -> Callable[[Values], Any]:
    import tensorflow as tf

    def differentiate(values: Values) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss, aux = function(values)
        gradients = tape.gradient(loss, values)
        # dense, as on JAX, because DTensor does not support sparse updates
        return (loss, aux), [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    return differentiate


def _values(scope: keras.StatelessScope, variables: Sequence[Any]) -> Values:
    """Return the values of variables at the end of a scope."""
    current = ((variable, scope.get_current_value(variable)) for variable in variables)
    return [variable.value if value is None else value for variable, value in current]


def _set_attributes(predictions: Any, attributes: list[tuple[Any, Any]]) -> None:
    for leaf, (mask, logits) in zip(tree.flatten(predictions), attributes, strict=True):
        if mask is not None:
            put_mask(leaf, mask)
        if logits is not None:
            put_logits(leaf, logits)
