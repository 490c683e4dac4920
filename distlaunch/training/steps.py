"""The step functions: Keras's own, the reference one of `loop: custom`, or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.errors import ConfigError, Problem
from distlaunch.strategies.functional_step import FunctionalStep, reference_loss
from distlaunch.strategies.protocol import Batch, Steps
from distlaunch.strategies.replica_share import global_rows, has_rows
from distlaunch.training.references import load_function

PerExampleLoss = Callable[[Any, Any], tf.Tensor]


class StepContext:
    """What a step function of `loop: custom` works with. One replica sees its rows of the global batch only.

    Attributes:
        model: the Keras model.
        optimizer: its optimizer.
    """

    def __init__(self, model: keras.Model, per_example_loss: PerExampleLoss | None) -> None:
        self.model = model
        self.optimizer = getattr(model, "optimizer", None)
        self._per_example_loss = per_example_loss

    @tf.autograph.experimental.do_not_convert
    def per_example_loss(self, y: Any, predictions: Any) -> Any:
        """The config's loss, not reduced: shape [rows]."""
        if self._per_example_loss is None:
            raise ConfigError(Problem(("compile", "loss"), "the step asks for a loss, but the config names none"))
        return self._per_example_loss(y, predictions)

    @tf.autograph.experimental.do_not_convert
    def average(self, per_example: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """This replica's share of the mean over the global batch: the sum over its rows / rows of the global batch.

        Args:
            per_example: shape [rows] or [rows, ...]; further dimensions are averaged.
            sample_weight: shape [rows].

        Returns:
            A scalar; summed over replicas, as gradients are, it is the mean of the whole batch.
        """
        if per_example.shape.rank is not None and per_example.shape.rank > 1:
            per_example = tf.reduce_mean(per_example, axis=list(range(1, per_example.shape.rank)))
        if sample_weight is not None:
            per_example = per_example * tf.cast(tf.reshape(sample_weight, tf.shape(per_example)), per_example.dtype)
        rows = global_rows()
        total = tf.cast(tf.shape(per_example)[0] if rows is None else rows, per_example.dtype)
        return has_rows(tf.reduce_sum(per_example)) / total

    @tf.autograph.experimental.do_not_convert
    def regularization(self) -> tf.Tensor:
        """This replica's share of the model's regularisation and other added losses: their sum / replicas."""
        context = tf.distribute.get_replica_context()
        replicas = 1 if context is None else context.num_replicas_in_sync
        return tf.add_n(self.model.losses) / replicas if self.model.losses else tf.constant(0.0)

    @tf.autograph.experimental.do_not_convert
    def apply(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """One optimizer step on all trainable variables; gradients are summed over replicas."""
        variables = self.model.trainable_variables
        assert self.optimizer is not None, "compile gives every model an optimizer"
        with tape:
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, variables), variables)


StepOf = Callable[[StepContext, Batch], dict[str, Any]]


def reference_step(context: StepContext, batch: Batch) -> dict[str, Any]:
    """Forward pass, per-example losses over the global batch size, regularisation over the replicas, one update."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        predictions = context.model(x, training=True)
        loss = context.average(context.per_example_loss(y, predictions), sample_weight) + context.regularization()
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, predictions, sample_weight)
    return {"loss": loss}


def make_steps(config: RunConfig, model: keras.Model) -> Steps:
    """The step functions that the config's loop asks for."""
    if keras.backend.backend() == "jax" or config.strategy.kind == "dtensor":
        return _functional_steps(config, model)
    test = model.test_step if model.compiled else None
    if config.train.loop == "fit":
        return Steps(model, model.train_step, test)
    context = StepContext(model, per_example(model) if model.compiled else None)
    if config.train.step is None:
        _check_reference(context)
        return Steps(model, lambda batch: reference_step(context, batch), test, logs="mean")
    # converted, not wrapped in a tf.function: that would be traced for one replica and used by all
    step: StepOf = tf.autograph.to_graph(load_function(config.train.step, ("train", "step")))
    return Steps(model, lambda batch: step(context, batch), test, logs="mean")


def _functional_steps(config: RunConfig, model: keras.Model) -> Steps:
    if not model.compiled:
        message = "missing: on a mesh the training step is Keras's own, so it needs an optimizer and a loss"
        raise ConfigError(Problem(("compile",), message))
    if config.train.loop == "custom":
        context = StepContext(model, per_example(model))
        _check_reference(context)
        step = FunctionalStep(model, reference_loss(model, context.per_example_loss))
        return Steps(model, step.train_step, step.test_step, logs="mean")
    step = FunctionalStep(model)
    return Steps(model, _own(model, "train_step") or step.train_step, _own(model, "test_step") or step.test_step)


def _own(model: keras.Model, name: str) -> Any:
    """The model's own functional step, as Keras on JAX has them; None if it has Keras's."""
    if getattr(type(model), name) is getattr(keras.Model, name):
        return None
    own = getattr(model, name)
    if len(inspect.signature(own).parameters) != 2:
        what = f"{type(model).__name__}.{name}(self, data)"
        message = f"the model's {what} assigns variables; on a mesh it must be {name}(self, state, data) -> logs, state"
        raise ConfigError(Problem(("model", "function"), f"{message}; write it so, or use another strategy"))
    return own


def per_example(model: keras.Model) -> PerExampleLoss | None:
    """The compiled loss without its reduction; None if there is not exactly one."""
    loss = getattr(model, "loss", None)
    if loss is None or isinstance(loss, (dict, list, tuple)):
        return None
    loss: Any = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        return loss
    unreduced: Any = type(loss).from_config({**loss.get_config(), "reduction": "none"})
    return unreduced


def _check_reference(context: StepContext) -> None:
    if context._per_example_loss is None:
        message = "the reference step of 'loop: custom' needs exactly one loss; name it, or use 'loop: fit'"
        raise ConfigError(Problem(("compile", "loss"), message))
