"""Makes the losses of several replicas add up to exactly the loss of one device; see `strategies.replica.share`.

It also replaces the moments of synchronized BatchNorm, so that a replica without rows does not count its stand-in row.
tests/parity compares every case with one device, which also detects changes in Keras.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras

from distlaunch.patches.keras_private import layers_of, mask_of, put_mask
from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.share import Reduction, ReplicaShare, current_replica_share, zero_without_rows

_LOSSES = "keras.src.losses.loss"
_COMPILE_LOSS = "keras.src.trainers.compile_utils.CompileLoss"
_MODEL = "keras.Model"  # inherits from the backend's trainer, a class whose name differs between versions of Keras
_NN = "keras.src.backend.tensorflow.nn"
_BATCH_NORM = "keras.layers.BatchNormalization"
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
        Symbol(f"{_COMPILE_LOSS}.build", "(self, y_true, y_pred)"),
        Symbol(f"{_MODEL}._aggregate_additional_loss", "(self, loss)"),
        Symbol(f"{_MODEL}._compute_loss", "(self, x=None, y=None, y_pred=None, sample_weight=None, training=True)"),
        Symbol("keras.Layer._get_own_losses", "(self)"),
        Symbol(f"{_NN}._compute_moments_sync", "(x, axes, keepdims)"),
        Symbol(f"{_BATCH_NORM}._moments", "(self, inputs, mask)"),
    ),
    why="Keras divides a replica's mean loss by the number of replicas, which is correct only if all replicas have "
    "the same number of rows. It divides a masked or weighted mean by the replica's sum of the mask or weights, not by "
    "the sum over all rows, and adds a loss that is already a scalar once for each replica. It synchronizes BatchNorm "
    "only without a mask.",
    until="Keras weights a replica's loss by its share of the global batch.",
)

_local = threading.local()  # each replica is traced in a separate thread


@functools.cache
def install() -> None:
    """Replace Keras's scaling of losses for replicas by the exact scaling; a second call does nothing."""
    PATCH.check()
    _replace_scaling()
    _replace_reduction()
    _replace_added_losses()
    _replace_total()
    _replace_moments()
    _replace_masked_moments()


def _replace_scaling() -> None:
    losses, compile_loss = internal(_LOSSES), internal(_COMPILE_LOSS)
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution
    compile_loss_call, compile_loss_build = compile_loss.call, compile_loss.build

    def scale_by_share(value: Any) -> Any:
        share = current_replica_share()
        return scale(value) if share is None else share.scale_mean(value)

    def unscale_by_share(value: Any) -> Any:
        """Return the value for a loss tracker, which weights batches by rows, or equally if it is in `CompileLoss`."""
        share = current_replica_share()
        if share is None:
            return unscale(value)
        if share.has_all_rows:
            return value
        if share.kind.scale == "mean":
            return value if _is_in_compile_loss() else _tracked_total(value, share)
        if _is_in_compile_loss():  # losses of each output are tracked without weights, as a mean over replicas
            return value * tf.cast(tf.distribute.get_replica_context().num_replicas_in_sync, value.dtype)
        return tf.math.divide_no_nan(value, tf.cast(share.row_fraction, value.dtype))  # the tracker weights by the rows

    def build_compile_loss(self: Any, y_true: Any, y_pred: Any) -> None:
        compile_loss_build(self, y_true, y_pred)
        _wrap_losses(self)

    def call_compile_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        _wrap_losses(self)
        with _in_compile_loss():
            return compile_loss_call(self, *args, **kwargs)

    losses.scale_loss_for_distribution = scale_by_share
    losses.unscale_loss_for_distribution = unscale_by_share
    compile_loss.build, compile_loss.call = build_compile_loss, call_compile_loss


def _is_in_compile_loss() -> bool:
    return getattr(_local, "in_compile_loss", False)


@contextlib.contextmanager
def _in_compile_loss() -> Iterator[None]:
    _local.in_compile_loss = True
    try:
        yield
    finally:
        _local.in_compile_loss = False


def _tracked_total(value: Any, share: ReplicaShare) -> Any:
    """Undo the scaling that `compute_total` has applied to a loss for its gradient, in the convention `mean`."""
    if value.shape.rank:
        # one value per row; the tracker computes their mean
        return value if not share.kind.weighs_gradients else value * tf.cast(share.row_fraction, value.dtype)
    return value if share.kind.weighs_gradients else share.scale_sum(value)


def _wrap_losses(compile_loss: Any) -> None:
    """Wrap each compiled loss, so that it adds up over replicas; a second call does nothing."""
    if not compile_loss.built or any(isinstance(entry.loss, CompiledLoss) for entry in compile_loss._flat_losses):
        return
    entries = enumerate(compile_loss._flat_losses)
    compile_loss._flat_losses = [entry._replace(loss=CompiledLoss(entry.loss, place)) for place, entry in entries]


class CompiledLoss:
    """A loss of a compiled model that adds up over replicas.

    Args:
        loss: a `keras.losses.Loss`.
        place: index among the model's losses.
    """

    def __init__(self, loss: Any, place: int) -> None:
        self.loss, self.place = loss, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = current_replica_share()
        if share is None or not share.uses_mean_convention:
            return self.loss(y_true, y_pred, sample_weight)
        reduction = share.kind.reductions.losses.get(self.place, Reduction.MEAN)
        if reduction is Reduction.WHOLE:
            arguments = [keras.tree.map_structure(share.gather_rows, part) for part in (y_true, y_pred)]
            _gather_masks(share, y_pred, arguments[1])
            weights = keras.tree.map_structure(share.gather_rows, sample_weight)
            with share.as_one_device():
                return self.loss(*arguments, weights)
        value = self.loss(y_true, y_pred, sample_weight)
        if share.trial is not None:
            share.trial.record("loss", (self.place,), value)
        # a loss without reduction has one value per row; these are summed when the total is differentiated
        return share.scale_sum(value) if reduction is Reduction.SUM and not value.shape.rank else value


def _gather_masks(share: ReplicaShare, parts: Any, gathered: Any) -> None:
    for part, whole in zip(keras.tree.flatten(parts), keras.tree.flatten(gathered), strict=True):
        if (mask := mask_of(part)) is not None:
            put_mask(whole, share.gather_rows(mask))


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
        share = current_replica_share()
        divisor = None if share is None or share.has_all_rows else _local_divisor(sample_weight, mask, reduction)
        if share is None or divisor is None:
            return reduce_weighted(values, sample_weight, mask, reduction, dtype)
        # a replica whose only row is a stand-in contributes nothing
        divisor = divisor * tf.cast(share.rows > 0, tf.float32)
        # with masks or weights, a replica's share is not proportional to its rows
        with share.weighted_by(tf.math.divide_no_nan(divisor, share.sum_over_replicas(divisor))):
            return reduce_weighted(values, sample_weight, mask, reduction, dtype)

    losses.reduce_weighted_values = reduce_globally


def _local_divisor(sample_weight: Any, mask: Any, reduction: Any) -> tf.Tensor | None:
    """Return the divisor of this replica's mean, or None if it is the number of rows."""
    weights = sample_weight if reduction == "mean_with_sample_weight" else None
    valid = mask if reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight") else None
    if valid is None:
        return None if weights is None else tf.reduce_sum(tf.cast(weights, tf.float32))
    valid = tf.cast(valid, tf.float32)
    if weights is not None:
        valid, weights = _SAME_RANK.get()(valid, tf.cast(weights, tf.float32))
        valid = valid * weights
    return tf.reduce_sum(valid)


def _replace_added_losses() -> None:
    model = internal(_MODEL)
    aggregate = model._aggregate_additional_loss

    def aggregate_in_scale(self: Any, loss: Any) -> Any:
        value, share = aggregate(self, loss), current_replica_share()
        if share is None or not share.uses_mean_convention:
            return value
        return share.scale_sum(value) if _reduction_of_added(self, loss, value, share) is Reduction.SUM else value

    model._aggregate_additional_loss = aggregate_in_scale


def part_of_added_loss(model: keras.Model, loss: Any) -> Any:
    """Return this replica's part of an added loss or of a regularizer's loss, in the convention `part`; a scalar."""
    value, share = tf.reduce_sum(loss), current_replica_share()
    if share is None or share.has_all_rows:
        return value
    if _reduction_of_added(model, loss, value, share) is Reduction.SUM:
        return zero_without_rows(value)
    return value * tf.cast(share.row_fraction, value.dtype)


def _reduction_of_added(model: keras.Model, loss: Any, value: Any, share: ReplicaShare) -> Reduction:
    for layer in layers_of(model):
        for number, own in enumerate(layer._get_own_losses()):
            if own is not loss:
                continue
            place = layer.path, number
            if share.trial is not None:
                share.trial.record("added", place, value)
            elif not adds_only_means(layer):
                share.kind.met.add("added")
            return share.kind.reductions.added.get(place, Reduction.MEAN)
    return Reduction.MEAN  # the loss of a regularizer of weights, which is the same in all replicas


def adds_only_means(layer: Any) -> bool:
    """Return whether the losses that a layer adds are known to be means over rows."""
    known = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    # a sum over the elements of the output, which Keras divides by the rows
    is_mean = layer.activity_regularizer is None or type(layer.activity_regularizer) in known
    return is_mean and type(layer).__module__.startswith("keras.")


def _replace_total() -> None:
    model = internal(_MODEL)
    compute = model._compute_loss

    def compute_total(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Compute the loss in Keras's own step; a user's step calls `compute_loss`."""
        share = current_replica_share()
        if share is None or not share.uses_mean_convention:
            return compute(self, x, y, y_pred, sample_weight, training)
        reduction = share.kind.reductions.total
        if reduction is Reduction.WHOLE:
            parts = [keras.tree.map_structure(share.gather_rows, part) for part in (x, y, y_pred, sample_weight)]
            with share.as_one_device():
                value = compute(self, *parts, training)
        else:
            value = compute(self, x, y, y_pred, sample_weight, training)
            if share.trial is not None:
                share.trial.record("total", (), value)
            if reduction is Reduction.SUM or value.shape.rank:
                value = share.scale_sum(value)
        return value if share.kind.weighs_gradients else value * tf.cast(share.row_fraction, value.dtype)

    model._compute_loss = compute_total


def _share_of_moments() -> ReplicaShare | None:
    """Return the share of this replica, or None if moments need no rows of other replicas."""
    share = current_replica_share()
    # outside a training step, for instance if the user calls the model
    if share is None or share.has_all_rows or tf.distribute.get_replica_context() is None:
        return None
    return share


def _as_moments(share: ReplicaShare, mean: Any, variance: Any) -> tuple[Any, Any]:
    """Return the moments of all rows. In a trial, the gradients of a part treat them as constants."""
    return (mean, variance) if share.trial is None else (tf.stop_gradient(mean), tf.stop_gradient(variance))


def _replace_moments() -> None:
    nn = internal(_NN)
    moments = nn._compute_moments_sync

    def moments_of_rows(x: Any, axes: Any, keepdims: bool) -> Any:
        if (share := _share_of_moments()) is None:
            return moments(x, axes, keepdims)
        local = [tf.reduce_sum(part, axes, keepdims=True) for part in (x, tf.square(x), tf.ones_like(x))]
        # three separate sums, as in Keras, because NCCL needs the same order in each replica
        total, squares, count = (share.sum_over_replicas(zero_without_rows(part)) for part in local)
        mean = total / count
        # E[x^2] - E[x]^2 may be slightly negative because of rounding
        variance = tf.maximum(squares / count - tf.square(mean), 0.0)
        mean, variance = _as_moments(share, mean, variance)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    nn._compute_moments_sync = moments_of_rows


def _replace_masked_moments() -> None:
    batch_norm = internal(_BATCH_NORM)
    moments = batch_norm._moments

    def moments_of_rows(self: Any, inputs: Any, mask: Any) -> Any:
        share = _share_of_moments()
        if share is None or mask is None or not self.synchronized:
            return moments(self, inputs, mask)
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

        def over_replicas(values: Any) -> Any:
            masked = tf.where(counted, values, tf.zeros_like(values))
            return share.sum_over_replicas(
                zero_without_rows(tf.reduce_sum(masked, self._reduction_axes, keepdims=True))
            )

        # the formula of Keras for one device
        count = over_replicas(tf.ones_like(inputs)) + keras.config.epsilon()
        mean = over_replicas(inputs) / count
        variance = over_replicas(tf.square(inputs - mean)) / count
        mean, variance = _as_moments(share, mean, variance)
        return tf.squeeze(mean), tf.squeeze(variance)

    batch_norm._moments = moments_of_rows
