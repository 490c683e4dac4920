"""Lets the losses of several replicas add up to exactly that of one device; see `strategies.replica.share`.

Also replaced are the moments of synchronized BatchNorm, in which a replica without rows would count its stand-in.
tests/parity compares every case with one device, so a change in Keras shows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distlaunch.strategies.patches.symbols import Patch, Symbol, internal
from distlaunch.strategies.replica.share import current_share, has_rows, sharing

_LOSSES = "keras.src.losses.loss"
_COMPILE_LOSS = "keras.src.trainers.compile_utils.CompileLoss"
_NN = "keras.src.backend.tensorflow.nn"
_SAME_RANK = Symbol(f"{_LOSSES}.squeeze_or_expand_to_same_rank", "(x1, x2, expand_rank_1=True)")

PATCH = Patch(
    symbols=(
        Symbol(f"{_LOSSES}.scale_loss_for_distribution", "(value)"),
        Symbol(f"{_LOSSES}.unscale_loss_for_distribution", "(value)"),
        Symbol(
            f"{_LOSSES}.reduce_weighted_values",
            "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', dtype=None)",
        ),
        _SAME_RANK,
        Symbol(f"{_COMPILE_LOSS}.call", "(self, y_true, y_pred, sample_weight=None)"),
        Symbol(f"{_NN}._compute_moments_sync", "(x, axes, keepdims)"),
    ),
    why="Keras divides a replica's mean loss by the number of replicas, which is right only while all replicas have "
    "equally many rows, and divides masked or weighted means by the replica's own count.",
    until="Keras weights a replica's loss by its share of the global batch.",
)

_local = threading.local()  # replicas are traced in threads of their own


@functools.cache
def install() -> None:
    """Replaces Keras's rule for replicas by the exact one; does nothing the second time."""
    PATCH.check()
    _replace_scaling()
    _replace_reduction()
    _replace_moments()


def _replace_scaling() -> None:
    losses, compile_loss = internal(_LOSSES), internal(_COMPILE_LOSS)
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution
    compile_loss_call = compile_loss.call

    def scale_by_share(value: Any) -> Any:
        share = current_share()
        return scale(value) if share is None else value * tf.cast(share, value.dtype)

    def unscale_by_share(value: Any) -> Any:
        share = current_share()
        if share is None:
            return unscale(value)
        if getattr(_local, "means", False):  # the losses of single outputs are tracked unweighted: a mean over replicas
            return value * tf.cast(tf.distribute.get_replica_context().num_replicas_in_sync, value.dtype)
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))  # the tracker weights by this replica's rows

    def call_with_means(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _tracking_means():
            return compile_loss_call(self, *args, **kwargs)

    losses.scale_loss_for_distribution = scale_by_share
    losses.unscale_loss_for_distribution = unscale_by_share
    compile_loss.call = call_with_means


@contextlib.contextmanager
def _tracking_means() -> Iterator[None]:
    _local.means = True
    try:
        yield
    finally:
        _local.means = False


def _replace_reduction() -> None:
    losses = internal(_LOSSES)
    reduce_weighted = losses.reduce_weighted_values

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
        # a replica whose only row is a stand-in adds nothing to the whole
        divisor = divisor * tf.cast(share > 0, tf.float32)
        # with masks or weights the share is not that of rows: a replica may hold most of the weight
        whole = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, divisor)
        with sharing(tf.math.divide_no_nan(divisor, whole)):
            return reduce_weighted(values, sample_weight, mask, reduction, dtype)

    losses.reduce_weighted_values = reduce_globally


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
        valid, weights = _SAME_RANK.get()(valid, tf.cast(sample_weight, tf.float32))
        valid = valid * weights
    return tf.reduce_sum(valid)


def _replace_moments() -> None:
    nn = internal(_NN)
    moments = nn._compute_moments_sync

    def moments_of_rows(x: Any, axes: Any, keepdims: bool) -> Any:
        context = tf.distribute.get_replica_context()
        # outside of a step of ours, as when the user calls the model
        if current_share() is None or context is None:
            return moments(x, axes, keepdims)
        local = [tf.reduce_sum(part, axes, keepdims=True) for part in (x, tf.square(x), tf.ones_like(x))]
        # three sums and not one, as in Keras, which names NCCL's need of the same order in each replica
        total, squares, count = (context.all_reduce(tf.distribute.ReduceOp.SUM, has_rows(part)) for part in local)
        mean = total / count
        # rounding of E[x^2] - E[x]^2 may leave a tiny negative number
        variance = tf.maximum(squares / count - tf.square(mean), 0.0)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    nn._compute_moments_sync = moments_of_rows
