"""Runs a model before training only to create the variables of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.patches.keras_global_seed import share_generator
from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.strategies.variables import host_value

_OPTIMIZER = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_VARIABLE = "keras.src.backend.common.variables.Variable"
_IN_STATELESS = Symbol("keras.src.backend.common.stateless_scope.in_stateless_scope", "()")

PATCH = Patch(
    symbols=(
        Symbol(f"{_VARIABLE}.assign", "(self, value)"),
        _IN_STATELESS,
        Symbol(f"{_OPTIMIZER}.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.LossScaleOptimizer.apply", "(self, grads, trainable_variables=None)"),
    ),
    why="Keras creates variables while it traces the first step, which fails under tf.distribute, so the model is run "
    "before; its changes (seeds, counters, the state of recurrent layers) would affect training. And only a "
    "train_step of the user's knows which inputs its model takes.",
    until="Keras builds a model with its own training step before the first trace.",
)


def make_variables_by(model: keras.Model, rows: Any) -> None:
    """Call a model's own training step without its effects: no variable keeps a new value, no optimizer is applied.

    Errors of the step are ignored here; the first real step reports them.

    Args:
        rows: a few rows, in the structure of a batch.
    """
    # random numbers without a seed take it from a variable as well
    share_generator(model)
    with undo_assignments(), _optimizers_idle(), contextlib.suppress(Exception):
        model.train_step(keras.tree.map_structure(tf.convert_to_tensor, rows))


@contextlib.contextmanager
def undo_assignments() -> Iterator[None]:
    """Restore the values of Keras variables that are assigned in this context.

    That includes assignments of layers while they are built, as when `fit` builds them.
    """
    PATCH.check()
    variable = internal(_VARIABLE)
    assign, in_stateless_scope = variable.assign, _IN_STATELESS.get()
    before: dict[int, tuple[Any, np.ndarray]] = {}

    def remember(self: Any, value: Any) -> Any:
        if not in_stateless_scope() and id(self) not in before:
            before[id(self)] = self, host_value(self)
        return assign(self, value)

    variable.assign = remember
    try:
        yield
    finally:
        variable.assign = assign
        for changed, value in before.values():
            changed.assign(value)


@contextlib.contextmanager
def _optimizers_idle() -> Iterator[None]:
    # only classes with their own `apply`: others would keep the replacement
    optimizers = (internal(_OPTIMIZER), keras.optimizers.LossScaleOptimizer)
    applies = [cls.apply for cls in optimizers]

    def skip(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        return None

    for cls in optimizers:
        cls.apply = skip
    try:
        yield
    finally:
        for cls, apply in zip(optimizers, applies, strict=True):
            cls.apply = apply
