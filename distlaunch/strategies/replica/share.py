"""Scales a replica's losses and gradients by its share of the global batch, so that they add up to those of one device.

There are two conventions for a loss within a replica's step.

`mean` (Keras's steps, and a user's own `train_step`): a loss has the same scale as on one device. Its mean over the
replicas, weighted by rows, is the loss of the global batch. A mean over the replica's rows is such a value; masked and
weighted means must be scaled. Gradients are averaged with the same weights.

`part` (`loop: custom`): a loss is this replica's part of the loss of the global batch. The parts are summed, and so
are the gradients. Source: TensorFlow's guide to custom training with tf.distribute.Strategy, "sum over examples /
global batch size".

The modules `keras_losses`, `keras_replica_metrics` and `keras_gradient_sums` of `strategies.patches` make Keras follow
these conventions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.row_random import RowPlace, draw_for_rows

if TYPE_CHECKING:
    from distlaunch.strategies.replica.peer_sums import ReplicaSums
    from distlaunch.strategies.replica.trial import StepTrial

_local = threading.local()  # each replica is traced in a separate thread


class Reduction(Enum):
    """The way in which the value of the global batch follows from the values of the replicas."""

    MEAN = "mean"
    """The mean of the replicas' values, weighted by rows."""
    SUM = "sum"
    """The sum of the replicas' values."""
    WHOLE = "whole"
    """No combination of the replicas' values; it must be computed from the rows of all replicas."""
    RESULT = "result"
    """Logged value: the result of the metric with the same name, after the metric's states were summed."""


@dataclass
class Reductions:
    """Reductions over replicas of a model's losses, metrics and logs that are not `Reduction.MEAN`.

    Attributes:
        losses: compiled losses, by the index of the model's output.
        added: losses added with `add_loss`, by the layer's path and the index of the call.
        total: the result of an overridden `compute_loss`.
        metrics: indices of the model's metrics that are computed from the rows of all replicas.
        scalars: values that a step of `loop: custom` passes to a `Mean`, one for a batch, by the path of its variable.
        same_rows: sparse gradients in which all replicas have the same rows of a table, for example of positions, by
            the indices of the optimizer and of the variable.
    """

    losses: dict[int, Reduction] = field(default_factory=dict)
    added: dict[tuple[str, int], Reduction] = field(default_factory=dict)
    total: Reduction = Reduction.MEAN
    metrics: set[int] = field(default_factory=set)
    scalars: dict[str, Reduction] = field(default_factory=dict)
    same_rows: set[tuple[int, int]] = field(default_factory=set)

    @property
    def gathers(self) -> bool:
        """True if anything is computed from the rows of all replicas."""
        return bool(self.metrics) or Reduction.WHOLE in (self.total, *self.losses.values())


@dataclass(frozen=True)
class StepKind:
    """The treatment of losses and gradients in a step.

    Attributes:
        scale: the convention for losses; see the module.
        weighs_gradients: whether gradients must be weighted by the replica's rows, because a user's `train_step` has
            differentiated a loss in the convention `mean`. Keras's own step weights the loss before differentiation.
        reductions: how the model's values add up.
        is_test: whether this is an evaluation step.
        logs: how the values that the step returns add up, by name.
        met: values in a trace of the step that only a trial can classify: `sparse` gradients and `added` losses.
    """

    scale: Literal["mean", "part"]
    weighs_gradients: bool = False
    reductions: Reductions = field(default_factory=Reductions)
    is_test: bool = False
    logs: dict[str, Reduction] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)

    @property
    def takes_whole_batches(self) -> bool:
        """True if each replica evaluates whole batches, because values of the step do not add up."""
        return self.is_test and Reduction.WHOLE in self.logs.values()


@dataclass(frozen=True)
class ReplicaShare:
    """A replica's rows of the global batch, and how its step treats losses.

    Attributes:
        rows: number of this replica's examples, a float32 scalar; 0 if its only row is a stand-in.
        total: number of examples of the global batch, a float32 scalar.
        start: index of the replica's first example in the global batch, an int64 scalar.
        kind: how the step treats losses.
        sums: how gradients are summed over replicas; None in a trial.
        weight: this replica's fraction of the sum of a mask or of weights, for a mean over these instead of over rows.
        trial: set while parts of a batch are computed one after the other, to find out how values add up.
        has_all_rows: whether this replica has all rows, as one device would.
    """

    rows: tf.Tensor
    total: tf.Tensor
    start: tf.Tensor
    kind: StepKind
    sums: ReplicaSums | None = None
    weight: tf.Tensor | None = None
    trial: StepTrial | None = None
    has_all_rows: bool = False

    @property
    def row_fraction(self) -> tf.Tensor:
        """The replica's fraction of the rows of the global batch, float32."""
        return self.rows / self.total

    @property
    def uses_mean_convention(self) -> bool:
        """True if losses follow the convention `mean`."""
        return self.kind.scale == "mean" and not self.has_all_rows

    def scale_mean(self, value: Any) -> Any:
        """Return a mean over this replica's rows, mask or weights, scaled as the step's convention requires."""
        if self.has_all_rows:
            return value
        if self.kind.scale == "part":
            return value * tf.cast(self.row_fraction if self.weight is None else self.weight, value.dtype)
        if self.weight is None:
            return value
        return value * tf.cast(tf.math.divide_no_nan(self.weight, self.row_fraction), value.dtype)

    def scale_sum(self, value: Any) -> Any:
        """Return this replica's part of a sum over replicas, scaled for the convention `mean`."""
        return tf.math.divide_no_nan(value, tf.cast(self.row_fraction, value.dtype))

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Return the sum of a value over all replicas; all must call it in the same order."""
        if self.has_all_rows:
            return value
        if self.trial is not None:
            return self.trial.sum_over_replicas(value)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    def gather_rows(self, value: Any) -> Any:
        """Return the rows of all replicas, in the order of the global batch.

        Only this replica's rows have a gradient. The gradient is scaled, so that the mean over replicas, weighted by
        rows, is the gradient of one device.

        Args:
            value: a tensor whose first dimension is the rows, or a multiple of them; a scalar is returned unchanged.

        Raises:
            TypeError: the value is text or a ragged tensor, which cannot be summed over replicas.
        """
        if value is None or (isinstance(value, tf.Tensor) and not value.shape.rank):
            return value
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise TypeError(f"{type(value).__name__} of {getattr(value, 'dtype', 'unknown type')}")
        rows, start, total = (tf.cast(number, tf.int64) for number in (self.rows, self.start, self.total))
        length = tf.shape(value, tf.int64)[0]
        # more than 1 if rows were merged with other dimensions; a replica without rows has one stand-in row
        times = length // tf.maximum(rows, 1)
        own = _with_scaled_gradient(value[: rows * times], self.row_fraction)
        before, after = start * times, (total - start - rows) * times
        summable = tf.cast(own, tf.int32) if own.dtype == tf.bool else own
        rest = tf.shape(value, tf.int64)[1:]
        zeros = [tf.zeros(tf.concat([[number], rest], 0), summable.dtype) for number in (before, after)]
        padded = tf.concat([zeros[0], tf.stop_gradient(summable), zeros[1]], 0)
        whole = tf.stop_gradient(
            self.sum_over_replicas(padded) if self.trial is None else self.trial.sum_over_replicas(padded)
        )
        whole = tf.cast(whole, own.dtype)
        result = tf.concat([whole[:before], own, whole[before + rows * times :]], 0)
        result.set_shape([None, *value.shape[1:]])
        return result

    @contextlib.contextmanager
    def as_one_device(self) -> Iterator[None]:
        """Compute as one device with all rows would, in this context."""
        with _set(replace(self, has_all_rows=True)):
            yield

    @contextlib.contextmanager
    def weighted_by(self, weight: tf.Tensor) -> Iterator[None]:
        """Compute means over a mask or weights in this context.

        Args:
            weight: this replica's fraction of the sum of the mask or the weights.
        """
        with _set(replace(self, weight=weight)):
            yield


def _with_scaled_gradient(value: tf.Tensor, share: tf.Tensor) -> Any:
    @tf.custom_gradient
    def scaled(value: tf.Tensor, share: tf.Tensor) -> Any:
        def scale_gradient(gradient: tf.Tensor) -> Any:
            return tf.math.divide_no_nan(gradient, tf.cast(share, gradient.dtype)), None

        return tf.identity(value), scale_gradient

    return scaled(value, share)


@contextlib.contextmanager
def _set(share: ReplicaShare) -> Iterator[None]:
    before = getattr(_local, "share", None)
    _local.share = share
    try:
        yield
    finally:
        _local.share = before


@contextlib.contextmanager
def replica_share(share: ReplicaShare) -> Iterator[None]:
    """Make Keras's losses, metrics and random numbers fit this replica's rows of the global batch, in this context."""
    # at least 1, for the stand-in row
    place = RowPlace(share.start, tf.maximum(tf.cast(share.rows, tf.int64), 1), tf.cast(share.total, tf.int64))
    with _set(share), draw_for_rows(place):
        yield


def current_replica_share() -> ReplicaShare | None:
    """Return the share of the replica whose step is traced in this thread, or None outside a step."""
    return getattr(_local, "share", None)


def global_rows() -> tf.Tensor | None:
    """Return the number of examples of the global batch, or None outside `replica_share`."""
    share = current_replica_share()
    return None if share is None else share.total


def zero_without_rows(value: tf.Tensor) -> tf.Tensor:
    """Return the value, or zero in a replica whose only row is a stand-in."""
    share = current_replica_share()
    return value if share is None else tf.where(share.rows > 0, value, tf.zeros_like(value))
