"""Runs a model before training, only to create the variables of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes
from distlaunch.patches.tensorflow_late import tf
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
    why="Keras creates variables while it traces the first step, which fails under tf.distribute. So the model is run "
    "once before, and its changes (seeds, counters, the state of recurrent layers) must not affect training. For a "
    "model with its own train_step, that step is run, since only the step knows which inputs the model takes.",
    until="Keras builds a model with its own training step before the first trace.",
)


def create_variables_by_step(model: keras.Model, rows: Any) -> None:
    """Create variables by calling a model's own training step, without changing values or applying optimizers.

    Errors of the step are ignored here; the first real step reports them.

    Args:
        rows: a few rows, in the structure of a batch.
    """
    with undo_assignments(), _skip_optimizers(), contextlib.suppress(Exception):
        model.train_step(keras.tree.map_structure(tf.convert_to_tensor, rows))


@contextlib.contextmanager
def undo_assignments() -> Iterator[None]:
    """Restore the values of Keras variables that are assigned in this context.

    This includes assignments that layers make while they are built.
    """
    PATCH.check()
    variable = internal(_VARIABLE)
    assign, in_stateless_scope = variable.assign, _IN_STATELESS.get()
    before: dict[int, tuple[Any, np.ndarray]] = {}

    def remember(self: Any, value: Any) -> Any:
        if not in_stateless_scope() and id(self) not in before:
            before[id(self)] = self, host_value(self)
        return assign(self, value)

    try:
        with replaced_attributes([(variable, "assign", remember)]):
            yield
    finally:
        for changed, value in before.values():
            changed.assign(value)


@contextlib.contextmanager
def _skip_optimizers() -> Iterator[None]:
    # only the classes that define `apply`, so that the original can be restored
    optimizers = (internal(_OPTIMIZER), keras.optimizers.LossScaleOptimizer)

    def skip(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        return None

    with replaced_attributes((cls, "apply", skip) for cls in optimizers):
        yield
