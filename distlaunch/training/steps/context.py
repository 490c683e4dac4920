"""What a step function of `loop: custom` works with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.strategies.replica.share import current_share, global_rows, has_rows

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
    def sum(self, per_example: tf.Tensor) -> tf.Tensor:
        """The sum over this replica's rows; summed over replicas, as gradients are, it is that of the whole batch.

        Args:
            per_example: shape [rows].
        """
        return has_rows(tf.reduce_sum(per_example))

    @tf.autograph.experimental.do_not_convert
    def regularization(self) -> tf.Tensor:
        """This replica's share of the model's regularisation and other added losses: they count by its rows.

        Those of activities are means over the replica's rows, so an equal part would be wrong for an uneven batch.
        """
        losses = [
            tf.cast(loss, keras.config.floatx()) for loss in self.model.losses
        ]  # mixed: of activities, in 16 bits
        share = current_share()
        total = tf.add_n(losses) if losses else tf.constant(0.0)
        return total if share is None else total * tf.cast(share, total.dtype)

    @tf.autograph.experimental.do_not_convert
    def apply(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """One optimizer step on all trainable variables; gradients are summed over replicas."""
        variables = self.model.trainable_variables
        assert self.optimizer is not None, "compile gives every model an optimizer"
        with tape:  # recorded too: the optimizer divides gradients by the scale
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(self.gradients(tape, scaled, variables), variables)

    @tf.autograph.experimental.do_not_convert
    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> list[Any]:
        """This replica's gradients; None for a variable that the loss does not depend on."""
        return tape.gradient(loss, variables)


def per_example(model: keras.Model) -> PerExampleLoss | None:
    """The compiled loss without its reduction; None if there is not exactly one."""
    loss = getattr(model, "loss", None)
    if loss is None or isinstance(loss, (dict, list, tuple)):
        return None
    loss: Any = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        return loss
    # not `loss.reduction = ...`: the model's own loss stays as compiled
    unreduced: Any = type(loss).from_config({**loss.get_config(), "reduction": "none"})
    return unreduced


def check_reference(context: StepContext) -> None:
    if context._per_example_loss is None:
        message = "the reference step of 'loop: custom' needs exactly one loss; name it, or use 'loop: fit'"
        raise ConfigError(Problem(("compile", "loss"), message))


def num_arguments(step: Callable[..., Any]) -> int:
    """2 for a `step(context, batch)`, 3 for a `step(context, state, batch)`."""
    return len(inspect.signature(step).parameters)
