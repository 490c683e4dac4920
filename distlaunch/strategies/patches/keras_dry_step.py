"""Runs a training step of the user's for what it creates: the variables of layers, and nothing else."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (what pyright infers of Keras's classes is often wrong)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from distlaunch.strategies.patches.keras_global_seed import share_generator
from distlaunch.strategies.patches.symbols import Patch, Symbol, internal

_OPTIMIZER = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_VARIABLE = "keras.src.backend.common.variables.Variable"

PATCH = Patch(
    symbols=(
        Symbol(f"{_VARIABLE}.assign", "(self, value)"),
        Symbol(f"{_OPTIMIZER}.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.LossScaleOptimizer.apply", "(self, grads, trainable_variables=None)"),
    ),
    why="Only a train_step of the user's knows which inputs its model takes; Keras creates the variables of its layers "
    "while it traces the first step, which fails under tf.distribute.",
    until="Keras builds a model by its own training step before the first trace.",
)


def make_variables_by(model: keras.Model, rows: Any) -> None:
    """Call a model's own training step without its effects: no variable is assigned, and no optimizer is applied.

    What the step raises is left to the first real step, which reports it.

    Args:
        rows: a few rows, in the structure of a batch.
    """
    PATCH.check()
    # a draw without a seed takes it from a variable as well
    share_generator(model)
    with _without_effects(), contextlib.suppress(Exception):
        model.train_step(keras.tree.map_structure(tf.convert_to_tensor, rows))


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    variable = internal(_VARIABLE)
    # a class that has no `apply` of its own would keep the one that is put there
    optimizers = (internal(_OPTIMIZER), keras.optimizers.LossScaleOptimizer)
    assign, applies = variable.assign, [cls.apply for cls in optimizers]

    def skip(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        return None

    def ignore(self: Any, value: Any) -> Any:
        return value

    variable.assign = ignore
    for cls in optimizers:
        cls.apply = skip
    try:
        yield
    finally:
        variable.assign = assign
        for cls, apply in zip(optimizers, applies, strict=True):
            cls.apply = apply
