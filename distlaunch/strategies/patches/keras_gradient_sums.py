"""Passes gradients to an optimizer after they are summed over replicas, so that clipping and accumulation are right."""

from __future__ import annotations

import types
from typing import Any

import keras
import tensorflow as tf

from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.strategies.replica.share import ReplicaShare, current
from distlaunch.strategies.variables import chain

PATCH = Patch(
    symbols=(
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.LossScaleOptimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.Optimizer._all_reduce_sum_gradients", "(self, grads_and_vars)"),
    ),
    why="Keras clips and accumulates each replica's own gradients, and sums them over replicas afterwards.",
    until="Keras sums gradients before it clips and accumulates them.",
)


def sum_gradients_first(optimizer: keras.optimizers.Optimizer, place: int) -> None:
    """Make an optimizer sum gradients before anything else; a second call does nothing.

    Call it under a strategy with several replicas.

    Args:
        place: index of the optimizer among the model's optimizers.
    """
    if getattr(optimizer, "_distlaunch_sums_first", False):
        return
    PATCH.check()

    def apply_summed(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        context, at = tf.distribute.get_replica_context(), current()
        if context is None or context.num_replicas_in_sync == 1:
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        if at is not None and at.trial is not None:
            at.trial.note_gradients(self, grads)
            return None
        # None: the loss does not depend on the variable. `all_reduce` takes tensors only
        present = [index for index, gradient in enumerate(grads) if gradient is not None]
        self._distlaunch_sparse |= any(isinstance(grads[index], tf.IndexedSlices) for index in present)
        parts = [_weighed(grads[index], at) for index in present]
        same = set() if at is None else at.kind.adding_up.same_rows
        same = {index for index in present if (place, index) in same and isinstance(grads[index], tf.IndexedSlices)}
        # Sparse gradients of several replicas are joined, and an optimizer that squares each entry would square the
        # parts of a row apart. One device has one entry for a row that all examples share, such as a position.
        values = [part.values if index in same else part for index, part in zip(present, parts, strict=True)]
        # one call with the whole list, so that TensorFlow can pack them: the number of all-reduces costs, not their
        # size
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        for index, part, gradient in zip(present, parts, summed, strict=True):
            is_same = index in same
            grads[index] = tf.IndexedSlices(gradient, part.indices, part.dense_shape) if is_same else gradient
        return apply(self, grads, trainable_variables)

    optimizer._distlaunch_sparse = False
    for part in chain(optimizer):
        # Keras sums again inside the update, which would multiply gradients by the number of replicas
        part._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
    apply = optimizer.apply.__func__  # may be `keras_branches`'s replacement
    optimizer.apply = types.MethodType(apply_summed, optimizer)
    optimizer._distlaunch_sums_first = True


def _weighed(gradient: Any, at: ReplicaShare | None) -> Any:
    """Return the gradient of a replica's mean, weighted as its part of the whole batch's gradient."""
    if at is None or not at.kind.weighs_gradients:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weighed(gradient.values, at), gradient.indices, gradient.dense_shape)
    # the gradient of a stand-in row, even nan, must not count
    return tf.math.multiply_no_nan(gradient, tf.cast(at.share, gradient.dtype))


def has_sparse_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether a step traced with `sum_gradients_first` gathers sparse gradients (of embeddings)."""
    return getattr(optimizer, "_distlaunch_sparse", False)
