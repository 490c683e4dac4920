"""Builds the optimizers that a model's own step would build with its first batch.

A step that is traced for several devices cannot create variables, and a checkpoint's values need existing variables.
So the step is traced once on one device, to learn which variables it passes to which optimizer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch, any_rows
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.protocol import Strategy
from distlaunch.strategies.variables import optimizers_of
from distlaunch.training.build import has_own_step
from distlaunch.training.steps.functions import make_steps


def build_used_optimizers(config: RunConfig, strategy: Strategy, model: keras.Model, rows: Batch) -> None:
    """Build each optimizer that the training step applies.

    Args:
        rows: a few examples.

    Raises:
        ConfigError: an optimizer has no variables, the trace does not show which variables it trains, and the strategy
            cannot build it in the first training step.
    """
    unbuilt = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
    from_user = config.train.step is None
    if not unbuilt or not has_own_step(config, model) or (config.strategy.is_functional and not from_user):
        return
    on_jax = not config.strategy.runs_tensorflow
    reason: Exception | None = None
    if not on_jax:
        with _record_applied(unbuilt) as applied:
            reason = _trace(model.train_step if from_user else make_steps(config, model).train, rows)
        with strategy.scope():
            for optimizer, variables in applied:
                if not optimizer.built:
                    optimizer.build(variables)
        unbuilt = [optimizer for optimizer in unbuilt if not optimizer.built]
    # only one device can build an optimizer in the first step
    too_late = config.strategy.is_functional
    if not too_late:
        with strategy.scope():
            too_late = tf.distribute.has_strategy()
    # a step that was traced to its end has applied all optimizers that it uses
    if unbuilt and (on_jax or (reason is not None and too_late)):
        raise _not_built(unbuilt[0], reason)


def _trace(step: Callable[[Batch], Any], rows: Batch) -> Exception | None:
    """Trace a step, and return the error that it raised, or None."""
    specs = tf.nest.map_structure(any_rows, rows)
    try:
        tf.function(step, autograph=False).get_concrete_function(specs)
    # the user's step may raise any error, for instance because it needs more rows
    except Exception as error:
        return error
    return None


@contextmanager
def _record_applied(optimizers: list[Any]) -> Iterator[list[tuple[Any, list[Any]]]]:
    """Yield a list that receives each optimizer that is applied, with its variables; nothing is updated meanwhile."""
    applied: list[tuple[Any, list[Any]]] = []

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        applied.append((self, list(trainable_variables or ())))

    for optimizer in optimizers:
        optimizer.apply = types.MethodType(apply, optimizer)
    try:
        yield applied
    finally:
        for optimizer in optimizers:
            del optimizer.apply


def _not_built(optimizer: keras.optimizers.Optimizer, reason: Exception | None) -> ConfigError:
    message = f"the model's optimizer '{optimizer.name}' has no variables yet"
    if reason is not None:
        first = reason_of(reason)
        message += f", and tracing the model's step to find them failed ({first})"
    hint = "call the optimizer's build(variables) in the model's function"
    return ConfigError(Problem(("model", "function"), f"{message}; {hint}"))
