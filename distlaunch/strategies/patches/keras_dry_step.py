"""Runs a training step of the user's for what it creates: variables of layers and optimizers, and nothing else."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (what pyright infers of Keras's classes is often wrong)
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from distlaunch.strategies.patches.keras_global_seed import share_generator
from distlaunch.strategies.patches.symbols import Patch, Symbol, internal

_VARIABLE = "keras.src.backend.common.variables.Variable"

PATCH = Patch(
    symbols=(
        Symbol(f"{_VARIABLE}.assign", "(self, value)"),
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.LossScaleOptimizer.apply", "(self, grads, trainable_variables=None)"),
    ),
    why="Only a train_step of the user's knows which inputs its model takes and which variables its optimizers update; "
    "Keras creates what is missing while it traces the first step, which fails under tf.distribute.",
    until="Keras builds a model by its own training step before the first trace.",
)


def make_variables_by(step: Callable[[Any], Any], rows: Any) -> None:
    """Call a training step without its effects: no variable is assigned, and optimizers are built, not applied.

    What the step raises is left to the first real step, which reports it.

    Args:
        step: a function of a batch.
        rows: a few rows, in the structure of a batch.
    """
    PATCH.check()
    # a draw without a seed takes it from a variable as well
    share_generator()
    with _without_effects(), contextlib.suppress(Exception):
        step(keras.tree.map_structure(tf.convert_to_tensor, rows))


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    variable = internal(_VARIABLE)
    optimizers = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    assign, applies = variable.assign, [cls.apply for cls in optimizers]

    def build(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built and trainable_variables is not None:
            # its own variables get their first values
            variable.assign = assign
            try:
                self.build(list(trainable_variables))
            finally:
                variable.assign = ignore

    def ignore(self: Any, value: Any) -> Any:
        return value

    variable.assign = ignore
    for cls in optimizers:
        cls.apply = build
    try:
        yield
    finally:
        variable.assign = assign
        for cls, apply in zip(optimizers, applies, strict=True):
            cls.apply = apply
