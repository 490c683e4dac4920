"""Runs a model before training for what it creates, the variables of layers, and for nothing else."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (what pyright infers of Keras's classes is often wrong)
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
    "before; what that changes (seeds, counters, the state of recurrent layers) would show in training. And only a "
    "train_step of the user's knows which inputs its model takes.",
    until="Keras builds a model by its own training step before the first trace.",
)


def make_variables_by(model: keras.Model, rows: Any) -> None:
    """Call a model's own training step without its effects: no variable keeps a new value, no optimizer is applied.

    What the step raises is left to the first real step, which reports it.

    Args:
        rows: a few rows, in the structure of a batch.
    """
    # a draw without a seed takes it from a variable as well
    share_generator(model)
    with assignments_undone(), _optimizers_idle(), contextlib.suppress(Exception):
        model.train_step(keras.tree.map_structure(tf.convert_to_tensor, rows))


@contextlib.contextmanager
def assignments_undone() -> Iterator[None]:
    """Give variables of Keras that are assigned within it their values back.

    That includes what layers assign while they are built, as where `fit` builds them.
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
    # a class that has no `apply` of its own would keep the one that is put there
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
