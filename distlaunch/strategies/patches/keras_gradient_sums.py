"""Sums gradients over replicas before the optimizer gets them, so that clipping and accumulation are correct."""

from __future__ import annotations

import types
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.share import ReplicaShare, current_replica_share
from distlaunch.strategies.variables import with_wrapped_optimizers

PATCH = Patch(
    symbols=(
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.LossScaleOptimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.Optimizer._all_reduce_sum_gradients", "(self, grads_and_vars)"),
    ),
    why="Keras clips and accumulates the gradients of each replica separately, and then sums them over replicas.",
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
        context, share = tf.distribute.get_replica_context(), current_replica_share()
        if context is None or context.num_replicas_in_sync == 1:
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        if share is not None and share.trial is not None:
            share.trial.record_gradients(self, grads)
            return None
        # a gradient is None if the loss does not depend on the variable, and `all_reduce` takes only tensors
        present = [index for index, gradient in enumerate(grads) if gradient is not None]
        if any(isinstance(grads[index], tf.IndexedSlices) for index in present):
            self._distlaunch_sparse = True
            if share is not None:
                share.kind.met.add("sparse")
        parts = [_weight_by_rows(grads[index], share) for index in present]
        same = set() if share is None else share.kind.reductions.same_rows
        same = {index for index in present if (place, index) in same and isinstance(grads[index], tf.IndexedSlices)}
        # Sparse gradients of several replicas are concatenated, and an optimizer that squares each entry would square
        # the parts of a row separately. If all replicas have the same rows, as in a table of positions, their values
        # are summed instead, because one device has a single entry for such a row.
        values = [part.values if index in same else part for index, part in zip(present, parts, strict=True)]
        if share is None or share.sums is None:
            summed = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        else:
            summed = share.sums.all_reduce(values, timed=True)
        for index, part, gradient in zip(present, parts, summed, strict=True):
            is_same = index in same
            grads[index] = tf.IndexedSlices(gradient, part.indices, part.dense_shape) if is_same else gradient
        return apply(self, grads, trainable_variables)

    optimizer._distlaunch_sparse = False
    for part in with_wrapped_optimizers(optimizer):
        # another sum inside the update would multiply gradients by the number of replicas
        part._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
    apply = optimizer.apply.__func__  # the class's method, or its replacement by `keras_branches`
    optimizer.apply = types.MethodType(apply_summed, optimizer)
    optimizer._distlaunch_sums_first = True


def _weight_by_rows(gradient: Any, share: ReplicaShare | None) -> Any:
    """Return a replica's gradient. It is weighted by the replica's rows if the step has not weighted the loss."""
    if share is None or not share.kind.weighs_gradients:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weight_by_rows(gradient.values, share), gradient.indices, gradient.dense_shape)
    # the gradient of a stand-in row must not count, even if it is nan
    return tf.math.multiply_no_nan(gradient, tf.cast(share.row_fraction, gradient.dtype))


def has_sparse_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether a step traced with `sum_gradients_first` has sparse gradients, such as those of embeddings."""
    return getattr(optimizer, "_distlaunch_sparse", False)
