"""Lets Keras's optimizers for TensorFlow update values in a stateless scope, as they can on other backends.

They read back what they assign, which DTensor gets wrong; here they get the methods of other backends. What they
do on a condition (accumulated gradients, averages that overwrite weights, loss scaling) Keras puts into the branches of
`ops.cond`, from which no assignment reaches a stateless scope: here both are computed, and their values selected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import ops
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

_NEUTRAL = (
    "assign",
    "assign_add",
    "assign_sub",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_backend_update_step",
    "_clip_by_norm",
    "_overwrite_model_variables_with_average_value",
    "_var_key",
)

# between an optimizer's own class, which may call its super's method, and Keras's class for TensorFlow
_Neutral = type("_Neutral", (TFOptimizer,), {name: vars(BaseOptimizer)[name] for name in _NEUTRAL})


def make_functional(optimizer: Any) -> None:
    """Lets a Keras optimizer for TensorFlow update tensors in a stateless scope, as it can on other backends."""
    cls = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with _selecting_instead_of_branching():
            return cls.apply(self, grads, trainable_variables)

    optimizer.__class__ = type(cls.__name__, (cls, _Neutral), {"apply": apply})
    variables = optimizer._trainable_variables
    optimizer._trainable_variables_indices = {id(variable): index for index, variable in enumerate(variables)}
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        make_functional(inner)


class _Branch(keras.StatelessScope):
    """What one branch assigns, over the values of the scope around it."""

    def __init__(self, around: Any) -> None:
        super().__init__()
        self._around = around
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return self._around.get_current_value(variable) if value is None else value


@contextlib.contextmanager
def _selecting_instead_of_branching() -> Iterator[None]:
    branching = ops.cond
    if branching is _select or not in_stateless_scope():
        yield
        return
    ops.cond = _select
    try:
        yield
    finally:
        ops.cond = branching


def _select(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """As `ops.cond`, of functions that may assign variables; both are computed."""
    scope: Any = get_stateless_scope()
    taken, results = [], []
    for function in (true_fn, false_fn):
        with _Branch(scope) as branch:
            results.append(function())
        taken.append(branch)
    for variable in {**taken[0].assigned, **taken[1].assigned}.values():
        values = [tf.cast(branch.get_current_value(variable), variable.dtype) for branch in taken]
        scope.add_update((variable, _where(pred, *values)))
    return None if results[0] is None else keras.tree.map_structure(lambda *pair: _where(pred, *pair), *results)


def _where(pred: Any, true: Any, false: Any) -> tf.Tensor:
    # of the same shape: DTensor's compiler crashes on a scalar beside a split tensor
    return tf.where(tf.broadcast_to(pred, tf.shape(true)), true, false)
