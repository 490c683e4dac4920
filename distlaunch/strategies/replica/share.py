"""Makes the losses and gradients of several replicas add up to exactly those of one device.

Keras divides a replica's mean loss by the number of replicas, which is right only while all replicas have equally many
rows, clips gradients before it sums them, and lets masked or weighted means divide by the replica's own count. Here a
replica's mean counts by its share of the rows (or of the mask, or of the weights) of the global batch, and gradients
are summed before anything else looks at them. Source of the rule: TensorFlow's guide to custom training with
tf.distribute.Strategy, "sum over examples / global batch size".

The functions replaced are `keras.src.losses.loss.{scale,unscale}_loss_for_distribution` and `reduce_weighted_values`,
and the moments of synchronized BatchNorm, in which a replica without rows would count its stand-in; tests/parity
compares every case with one device, so a change in Keras shows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.losses import loss as loss_module
from keras.src.trainers import compile_utils

from distlaunch.strategies.replica.input import first_row
from distlaunch.strategies.replica.row_random import Place, numbers_for

_local = threading.local()  # replicas are traced in threads of their own


@contextlib.contextmanager
def replica_share(rows: tf.Tensor, total: tf.Tensor) -> Iterator[None]:
    """Within it, Keras losses of this replica count as `rows` of `total` examples.

    Args:
        rows: scalar float32, examples of this replica; 0 for a replica that has none (its row is a stand-in).
        total: scalar float32, examples of the global batch.
    """
    _local.share, _local.means, _local.rows, _local.total = rows / total, False, rows, total
    try:
        with numbers_for(_place(rows, total)):
            yield
    finally:
        del _local.share, _local.rows, _local.total


def _place(rows: tf.Tensor, total: tf.Tensor) -> Place:
    context = tf.distribute.get_replica_context()
    index = tf.cast(context.replica_id_in_sync_group, tf.int64)
    whole = tf.cast(total, tf.int64)
    start = first_row(whole, index, context.num_replicas_in_sync)
    return Place(start, tf.maximum(tf.cast(rows, tf.int64), 1), whole)


def current_share() -> tf.Tensor | None:
    """This replica's part of the global batch, or None outside `replica_share`."""
    return getattr(_local, "share", None)


def global_rows() -> tf.Tensor | None:
    """Examples of the global batch, or None outside `replica_share`."""
    return getattr(_local, "total", None)


def has_rows(value: tf.Tensor) -> tf.Tensor:
    """The value, or zero in a replica whose only row is a stand-in."""
    rows = getattr(_local, "rows", None)
    return value if rows is None else tf.where(rows > 0, value, tf.zeros_like(value))


def install() -> None:
    """Replaces Keras's rule for replicas by the exact one; does nothing the second time."""
    if getattr(loss_module, "_distlaunch_installed", False):
        return
    scale, unscale = loss_module.scale_loss_for_distribution, loss_module.unscale_loss_for_distribution
    reduce_weighted, compile_loss_call = loss_module.reduce_weighted_values, compile_utils.CompileLoss.call
    moments = keras_nn._compute_moments_sync

    def scale_by_share(value: Any) -> Any:
        share = current_share()
        return scale(value) if share is None else value * tf.cast(share, value.dtype)

    def unscale_by_share(value: Any) -> Any:
        share = current_share()
        if share is None:
            return unscale(value)
        if _local.means:  # the losses of single outputs are tracked unweighted: a mean over replicas
            return value * tf.cast(tf.distribute.get_replica_context().num_replicas_in_sync, value.dtype)
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))  # the tracker weights by this replica's rows

    @functools.wraps(reduce_weighted)
    def reduce_globally(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        share = current_share()
        divisor = _local_divisor(sample_weight, mask, reduction)
        if share is None or divisor is None:
            return reduce_weighted(values, sample_weight, mask, reduction, dtype)
        divisor = divisor * tf.cast(share > 0, tf.float32)
        whole = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, divisor)
        _local.share = tf.math.divide_no_nan(divisor, whole)
        try:
            return reduce_weighted(values, sample_weight, mask, reduction, dtype)
        finally:
            _local.share = share

    def moments_of_rows(x: Any, axes: Any, keepdims: bool) -> Any:
        context = tf.distribute.get_replica_context()
        if current_share() is None or context is None:
            return moments(x, axes, keepdims)
        local = [tf.reduce_sum(part, axes, keepdims=True) for part in (x, tf.square(x), tf.ones_like(x))]
        total, squares, count = (context.all_reduce(tf.distribute.ReduceOp.SUM, has_rows(part)) for part in local)
        mean = total / count
        variance = tf.maximum(squares / count - tf.square(mean), 0.0)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    def call_with_means(self: Any, *args: Any, **kwargs: Any) -> Any:
        _local.means = True
        try:
            return compile_loss_call(self, *args, **kwargs)
        finally:
            _local.means = False

    loss_module.scale_loss_for_distribution = scale_by_share
    loss_module.unscale_loss_for_distribution = unscale_by_share
    loss_module.reduce_weighted_values = reduce_globally
    compile_utils.CompileLoss.call = call_with_means
    keras_nn._compute_moments_sync = moments_of_rows
    loss_module._distlaunch_installed = True


def _local_divisor(sample_weight: Any, mask: Any, reduction: Any) -> tf.Tensor | None:
    """What this replica's mean divides by, where that is not simply its number of rows."""
    weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
    masked = mask is not None and reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    if not weighted and not masked:
        return None
    if not masked:
        return tf.reduce_sum(tf.cast(sample_weight, tf.float32))
    valid: Any = tf.cast(mask, tf.float32)
    if weighted:
        valid, weights = loss_module.squeeze_or_expand_to_same_rank(valid, tf.cast(sample_weight, tf.float32))
        valid = valid * weights
    return tf.reduce_sum(valid)


def sum_gradients_first(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets the optimizer see gradients that are summed over replicas, so that clipping and accumulation are right."""
    if getattr(optimizer, "_distlaunch_sums_first", False):
        return

    def apply_summed(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        present = [index for index, gradient in enumerate(grads) if gradient is not None]
        self._distlaunch_sparse |= any(isinstance(grads[index], tf.IndexedSlices) for index in present)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [grads[index] for index in present])
        for index, gradient in zip(present, summed, strict=True):
            grads[index] = gradient
        return apply(self, grads, trainable_variables)

    optimizer._distlaunch_sparse = False
    for part in chain(optimizer):
        part._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
    apply = optimizer.apply.__func__  # which may branch together
    optimizer.apply = types.MethodType(apply_summed, optimizer)
    optimizer._distlaunch_sums_first = True


def has_sparse_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a step that was traced with `sum_gradients_first` gathers sparse gradients (of embeddings)."""
    return getattr(optimizer, "_distlaunch_sparse", False)


def chain(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those it wraps (LossScaleOptimizer)."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)
