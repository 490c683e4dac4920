"""The step functions: Keras's own, the reference one of `loop: custom`, or the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.function_references import load_function
from distlaunch.data.user_functions import both_ways
from distlaunch.strategies.protocol import Steps
from distlaunch.training.build import can_be_tested
from distlaunch.training.steps.context import StepContext, check_reference, num_arguments, per_example
from distlaunch.training.steps.mesh import mesh_steps

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


def make_steps(config: RunConfig, model: keras.Model, first_rows: Callable[[int], Batch] | None = None) -> Steps:
    """Return the step functions that the config's loop asks for.

    Args:
        first_rows: gives up to so many rows of the training data.
    """
    steps = _steps(config, model)
    test = steps.test if can_be_tested(model) else None
    sample = first_rows and (lambda rows: first_rows(min(rows, config.data.batch)))
    return dataclasses.replace(steps, test=test, stop_at_nonfinite=config.train.on_nonfinite == "fail", sample=sample)


def _steps(config: RunConfig, model: keras.Model) -> Steps:
    if config.strategy.is_functional:
        return mesh_steps(config, model)
    test = model.test_step
    if config.train.loop == "fit":
        return Steps(model, model.train_step, test)
    context = StepContext(model, per_example(model) if model.compiled else None)
    if config.train.step is None:
        check_reference(context)
        return Steps(model, lambda batch: reference_step(context, batch), test, logs="mean")
    function = load_function(config.train.step, ("train", "step"))
    if num_arguments(function) != 2:
        message = f"got '{config.train.step}', which takes {num_arguments(function)} arguments; expected"
        raise ConfigError(Problem(("train", "step"), f"{message} step(context, batch) under {config.strategy.kind}"))
    # converted, not wrapped in a tf.function: that would be traced for one replica and used by all
    step: StepOf = both_ways(function)
    return Steps(model, lambda batch: step(context, batch), test, logs="mean")
