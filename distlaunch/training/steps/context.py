"""The context that is passed to a step function of `loop: custom`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import compiled_with, mask_of, unreduced_loss
from distlaunch.patches.tensorflow_late import not_converted, tf
from distlaunch.strategies.patches.keras_losses import part_of_added_loss
from distlaunch.strategies.replica.share import global_rows, zero_without_rows

_MEANS = ("sum_over_batch_size", "mean")
PerExampleLoss = Callable[[Any, Any], Any]


class StepContext:
    """The context that is passed to a step function of `loop: custom`.

    Each replica calls the step function with its rows of the global batch.

    Attributes:
        model: the Keras model.
        optimizer: the model's optimizer.
    """

    def __init__(self, model: keras.Model, per_example_loss: PerExampleLoss | None) -> None:
        self.model = model
        self.optimizer = getattr(model, "optimizer", None)
        self._per_example_loss = per_example_loss

    @not_converted
    def per_example_loss(self, y: Any, predictions: Any) -> Any:
        """Return the config's loss without reduction, times its `loss_weights`; shape [rows] or [rows, ...]."""
        if self._per_example_loss is None:
            raise ConfigError(
                Problem(
                    ("compile", "loss"),
                    "missing: the step uses `context.per_example_loss`, but the config names no loss",
                )
            )
        return self._per_example_loss(y, predictions)

    @not_converted
    def average(self, per_example: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """Return this replica's contribution to the mean over the global batch.

        This is the sum over the replica's rows, divided by the number of rows of the global batch.

        Args:
            per_example: shape [rows] or [rows, ...]; further dimensions are averaged.
            sample_weight: shape [rows], or a weight for each value of `per_example`.

        Returns:
            A scalar. Its sum over replicas, which sum their gradients too, is the mean of the global batch.
        """
        if sample_weight is not None and sample_weight.shape.rank == per_example.shape.rank:
            per_example, sample_weight = per_example * tf.cast(sample_weight, per_example.dtype), None
        if per_example.shape.rank is not None and per_example.shape.rank > 1:
            per_example = tf.reduce_mean(per_example, axis=list(range(1, per_example.shape.rank)))
        if sample_weight is not None:
            per_example = per_example * tf.cast(tf.reshape(sample_weight, tf.shape(per_example)), per_example.dtype)
        rows = global_rows()
        total = tf.cast(tf.shape(per_example)[0] if rows is None else rows, per_example.dtype)
        return zero_without_rows(tf.reduce_sum(per_example)) / total

    @not_converted
    def sum(self, per_example: tf.Tensor) -> tf.Tensor:
        """Return the sum over this replica's rows.

        Its sum over replicas, which sum their gradients too, is the sum of the global batch.

        Args:
            per_example: shape [rows].
        """
        return zero_without_rows(tf.reduce_sum(per_example))

    @not_converted
    def regularization(self) -> tf.Tensor:
        """Return this replica's share of the model's regularization and other added losses.

        The share of weight regularization and of means over rows is proportional to the replica's rows. Equal shares
        would be wrong for an uneven batch.
        """
        # cast, because activity losses have 16 bits in mixed precision
        losses = [tf.cast(part_of_added_loss(self.model, loss), keras.config.floatx()) for loss in self.model.losses]
        return tf.add_n(losses) if losses else tf.zeros((), keras.config.floatx())

    @not_converted
    def apply(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """Apply one optimizer step to all trainable variables; gradients are summed over replicas."""
        variables = self.model.trainable_variables
        assert self.optimizer is not None, "compile gives every model an optimizer"
        with tape:  # the tape must record the scaling, because the optimizer divides the gradients by the scale
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(self.gradients(tape, scaled, variables), variables)

    @not_converted
    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> list[Any]:
        """Return this replica's gradients; None for a variable that the loss does not depend on."""
        return tape.gradient(loss, variables)


def _single_loss(model: keras.Model) -> Any:
    loss = getattr(model, "loss", None)
    return None if isinstance(loss, (dict, list, tuple)) else loss


def per_example(model: keras.Model) -> PerExampleLoss | None:
    """Return the compiled loss with its weight, without its reduction; None if there is no loss, or several."""
    loss = _single_loss(model)
    if loss is None:
        return None
    weights = keras.tree.flatten(compiled_with(model).get("loss_weights"))
    weight = next((weight for weight in weights if weight is not None), None)

    def compute(y: Any, predictions: Any) -> Any:
        values = unreduced_loss(loss, y, predictions)(y, predictions)
        return values if weight is None else values * weight

    return compute


def check_reference(model: keras.Model) -> None:
    """Raise ConfigError if the reference step cannot compute the loss of a model as `fit` does."""
    loss = _single_loss(model)
    if loss is None:
        message = "the reference step of 'loop: custom' needs exactly one loss; name it, or use 'loop: fit'"
        raise ConfigError(Problem(("compile", "loss"), message))
    reduction = getattr(loss, "reduction", _MEANS[0])
    if reduction not in _MEANS:
        message = (
            f"the reference step of 'loop: custom' computes means over the batch, but the loss has the reduction "
            f"'{reduction}'; use 'loop: fit', or a step of your own"
        )
        raise ConfigError(Problem(("compile", "loss"), message))


def check_not_masked(predictions: Any) -> None:
    """Raise ConfigError for masked predictions, for which `fit` computes the mean of the unmasked positions only."""
    if any(mask_of(tensor) is not None for tensor in keras.tree.flatten(predictions)):
        message = (
            "got 'custom', but the model masks positions of its output, as with Embedding(mask_zero=True), and the "
            "reference step computes means over all positions; use 'loop: fit', or a step of your own"
        )
        raise ConfigError(Problem(("train", "loop"), message))


def num_parameters(step: Callable[..., Any]) -> int:
    """Return the number of a step's parameters: 2 for `step(context, batch)`, 3 for `step(context, state, batch)`."""
    return len(inspect.signature(step).parameters)
