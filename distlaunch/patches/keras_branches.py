"""Lets optimizers branch between replicas: accumulated gradients, averages that overwrite weights.

Replicas meet first and take the branch together, as in Keras's own LossScaleOptimizer. Gradients are summed before (see
`keras_gradient_sums`), so accumulators hold those of the global batch in each replica.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from distlaunch.patches.symbols import Patch, Symbol, internal

PATCH = Patch(
    symbols=(
        Symbol("keras.src.ops.cond", "(pred, true_fn, false_fn)"),
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol(
            "keras.optimizers.Optimizer._overwrite_model_variables_with_average_value", "(self, trainable_variables)"
        ),
    ),
    why="Keras puts the update into a branch of `ops.cond` within each replica, where replicas cannot meet, as they "
    "must to update a variable.",
    until="Keras takes these branches across replicas, as it does for loss scaling.",
)

BRANCHES = ("gradient_accumulation_steps", "ema_overwrite_frequency")
"""Options of Keras's optimizers that are something to do in some steps only."""
_local = threading.local()  # replicas are traced in threads of their own


def branch_together(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets an optimizer under a strategy with replicas do what it does now and then."""
    if not any(getattr(optimizer, option, None) for option in BRANCHES) or hasattr(optimizer, "_distlaunch_branches"):
        return
    PATCH.check()
    _install()
    optimizer._distlaunch_branches = True
    # of the class: `sum_gradients_first` wraps what is put on the object here
    apply, overwrite = type(optimizer).apply, type(optimizer)._overwrite_model_variables_with_average_value

    def apply_together(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _local.applying = True
        try:
            return apply(self, grads, trainable_variables)
        finally:
            # the user's own `ops.cond`, outside of the update, keeps Keras's
            _local.applying = False

    def overwrite_together(self: Any, variables: Any) -> None:
        # Keras's method calls `extended.update`, which is allowed in a cross-replica context only
        context = tf.distribute.get_replica_context()
        if context is None:
            overwrite(self, variables)
        else:
            context.merge_call(lambda strategy: overwrite(self, variables))

    optimizer.apply = types.MethodType(apply_together, optimizer)
    optimizer._overwrite_model_variables_with_average_value = types.MethodType(overwrite_together, optimizer)


@functools.cache
def _install() -> None:
    """Replaces Keras's condition within `apply`; does nothing the second time."""
    ops = internal("keras.src.ops")
    branch = ops.cond

    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        if not getattr(_local, "applying", False) or not tf.distribute.has_strategy():
            return branch(pred, true_fn, false_fn)
        return tf.distribute.get_replica_context().merge_call(_branch_across, args=(pred, true_fn, false_fn))

    ops.cond = cond


def _branch_across(strategy: Any, pred: Any, true_fn: Any, false_fn: Any) -> None:
    """Each replica's own functions, but one decision: the counter that it depends on is the same in all."""

    def run(functions: Any) -> Callable[[], None]:
        return lambda: strategy.extended.call_for_each_replica(lambda function: function(), args=(functions,))

    # one predicate for all: a branch in which replicas meet must be taken by all of them
    tf.cond(strategy.experimental_local_results(pred)[0], run(true_fn), run(false_fn))
