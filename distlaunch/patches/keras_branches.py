"""Makes conditional updates of optimizers work across replicas: accumulated gradients, averages that overwrite weights.

Replicas synchronize first and take the branch together, as in Keras's own LossScaleOptimizer. Gradients are summed
before (see `keras_gradient_sums`), so the accumulators in each replica hold the gradients of the global batch.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import tf

PATCH = Patch(
    symbols=(
        Symbol("keras.src.ops.cond", "(pred, true_fn, false_fn)"),
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol(
            "keras.optimizers.Optimizer._overwrite_model_variables_with_average_value", "(self, trainable_variables)"
        ),
    ),
    why="Keras puts the update into a branch of `ops.cond` within each replica. An update of a variable requires that "
    "replicas synchronize, but they cannot do so there.",
    until="Keras takes these branches across replicas, as it does for loss scaling.",
)

BRANCHES = ("gradient_accumulation_steps", "ema_overwrite_frequency")
"""Options of Keras's optimizers that cause actions in some steps only."""
_local = threading.local()  # each replica is traced in a separate thread


def branch_together(optimizer: keras.optimizers.Optimizer) -> None:
    """Make an optimizer's conditional updates work under a strategy with replicas."""
    if not any(getattr(optimizer, option, None) for option in BRANCHES) or hasattr(optimizer, "_distlaunch_branches"):
        return
    PATCH.check()
    _install()
    optimizer._distlaunch_branches = True
    # the methods of the class, because `sum_gradients_first` will wrap those that are set on the object below
    apply, overwrite = type(optimizer).apply, type(optimizer)._overwrite_model_variables_with_average_value

    def apply_together(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _local.applying = True
        try:
            return apply(self, grads, trainable_variables)
        finally:
            # outside of the update, a user's own `ops.cond` must still be Keras's
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
    """Replace Keras's condition within `apply`; a second call does nothing."""
    ops = internal("keras.src.ops")
    branch = ops.cond

    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        if not getattr(_local, "applying", False) or not tf.distribute.has_strategy():
            return branch(pred, true_fn, false_fn)
        return tf.distribute.get_replica_context().merge_call(_branch_across, args=(pred, true_fn, false_fn))

    ops.cond = cond


def _branch_across(strategy: Any, pred: Any, true_fn: Any, false_fn: Any) -> None:
    """Run each replica's own functions after one decision for all, since the counter is the same in all replicas."""

    def run(functions: Any) -> Callable[[], None]:
        return lambda: strategy.extended.call_for_each_replica(lambda function: function(), args=(functions,))

    # one predicate for all: a branch in which replicas synchronize must be taken by all of them
    tf.cond(strategy.experimental_local_results(pred)[0], run(true_fn), run(false_fn))
