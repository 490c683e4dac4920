"""A replica's share of the global batch, so that losses and gradients add up to exactly those of one device.

There are two conventions for a loss within a replica's step.

`mean` (Keras's steps, and a user's own `train_step`): a loss keeps the scale that it has on one device, so that its
mean over the replicas, weighted by rows, is the loss of the global batch. A plain mean over the replica's rows already
is such a value. Masked and weighted means are scaled to become one. Gradients are averaged with the same weights.

`part` (`loop: custom`): a loss is this replica's part of the loss of the global batch; parts and gradients are summed.
Source: TensorFlow's guide to custom training with tf.distribute.Strategy, "sum over examples / global batch size".

`patches.keras_losses`, `patches.keras_replica_metrics` and `patches.keras_gradient_sums` make Keras follow them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from distlaunch.strategies.replica.row_random import RowPlace, numbers_for

if TYPE_CHECKING:
    from distlaunch.strategies.replica.trial import Trial

_local = threading.local()  # each replica is traced in a separate thread


class Adds(Enum):
    """The way in which values of several replicas give that of the global batch."""

    MEAN = "mean"
    """Their mean, weighted by rows."""
    SUM = "sum"
    """Their sum."""
    WHOLE = "whole"
    """Neither: the value has to be computed from the rows of all replicas."""
    RESULT = "result"
    """A log that is the result of the metric of that name, whose state adds up."""


@dataclass
class AddingUp:
    """How a model's losses, metrics and logs add up over replicas, if not by `Adds.MEAN`.

    Attributes:
        losses: compiled losses, by their index among those of the model's outputs.
        added: losses added with `add_loss`, by the layer's path and the number of the call.
        total: the result of an overridden `compute_loss`.
        metrics: metrics computed from the rows of all replicas, by their index among the model's.
        same_rows: sparse gradients for which each replica has the same rows of a table, such as positions, by the
            indices of the optimizer and of the variable.
    """

    losses: dict[int, Adds] = field(default_factory=dict)
    added: dict[tuple[str, int], Adds] = field(default_factory=dict)
    total: Adds = Adds.MEAN
    metrics: set[int] = field(default_factory=set)
    same_rows: set[tuple[int, int]] = field(default_factory=set)

    @property
    def gathers(self) -> bool:
        """Whether anything is computed from the rows of all replicas."""
        return bool(self.metrics) or Adds.WHOLE in (self.total, *self.losses.values())


@dataclass(frozen=True)
class StepKind:
    """How a step treats losses and gradients.

    Attributes:
        scale: the convention for losses, see the module.
        weighs_gradients: gradients are those of losses in the convention `mean`, so that each replica's are weighted by
            its rows; otherwise Keras's own step weights the loss before differentiation.
        adding_up: how the model's values add up.
        is_test: whether this is an evaluation step.
        logs: how the values that the step returns add up, by name.
    """

    scale: Literal["mean", "part"]
    weighs_gradients: bool = False
    adding_up: AddingUp = field(default_factory=AddingUp)
    is_test: bool = False
    logs: dict[str, Adds] = field(default_factory=dict)

    @property
    def takes_whole_batches(self) -> bool:
        """Whether each replica evaluates whole batches, because values of the step do not add up."""
        return self.is_test and Adds.WHOLE in self.logs.values()


@dataclass(frozen=True)
class ReplicaShare:
    """A replica's rows of the global batch, and how its step treats losses.

    Attributes:
        rows: examples of this replica, a float32 scalar; 0 for a replica without any (its row is a stand-in).
        total: examples of the global batch, a float32 scalar.
        start: index of the replica's first example in it, an int64 scalar.
        kind: how the step treats losses.
        weight: the replica's part of a mask or of weights, for a mean over them instead of over rows.
        trial: set while parts of a batch are computed one after the other, to find out how values add up.
        is_whole: whether all rows are here, as on one device.
    """

    rows: tf.Tensor
    total: tf.Tensor
    start: tf.Tensor
    kind: StepKind
    weight: tf.Tensor | None = None
    trial: Trial | None = None
    is_whole: bool = False

    @property
    def share(self) -> tf.Tensor:
        """The replica's part of the rows, float32."""
        return self.rows / self.total

    @property
    def keeps_scale(self) -> bool:
        """Whether losses follow the convention `mean`."""
        return self.kind.scale == "mean" and not self.is_whole

    def scaled(self, value: Any) -> Any:
        """Return a mean over this replica's rows (or mask, or weights) in the convention of the step."""
        if self.is_whole:
            return value
        if self.kind.scale == "part":
            return value * tf.cast(self.share if self.weight is None else self.weight, value.dtype)
        if self.weight is None:
            return value
        return value * tf.cast(tf.math.divide_no_nan(self.weight, self.share), value.dtype)

    def from_part(self, value: Any) -> Any:
        """Return a value that is summed over replicas, such as a sum over rows, in the convention `mean`."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Return the sum of a value over all replicas; all must call it in the same order."""
        if self.is_whole:
            return value
        if self.trial is not None:
            return self.trial.sum_over_replicas(value)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    def gathered(self, value: Any) -> Any:
        """Return the rows of all replicas, in the order of the global batch.

        Gradients reach this replica's rows only, scaled so that their mean over replicas, weighted by rows, is the
        gradient of one device.

        Args:
            value: a tensor whose first dimension is the rows, or a multiple of them; anything else is returned
                unchanged.

        Raises:
            TypeError: a tensor of text, or one with rows of different lengths, which cannot be summed over replicas.
        """
        if value is None or (isinstance(value, tf.Tensor) and not value.shape.rank):
            return value
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise TypeError(f"{type(value).__name__} of {getattr(value, 'dtype', 'unknown type')}")
        rows, start, total = (tf.cast(number, tf.int64) for number in (self.rows, self.start, self.total))
        length = tf.shape(value, tf.int64)[0]
        # rows may be merged with other dimensions; an empty replica has one stand-in row
        times = length // tf.maximum(rows, 1)
        own = _with_scaled_gradient(value[: rows * times], self.share)
        before, after = start * times, (total - start - rows) * times
        summable = tf.cast(own, tf.int32) if own.dtype == tf.bool else own
        rest = tf.shape(value, tf.int64)[1:]
        zeros = [tf.zeros(tf.concat([[number], rest], 0), summable.dtype) for number in (before, after)]
        padded = tf.concat([zeros[0], tf.stop_gradient(summable), zeros[1]], 0)
        whole = tf.stop_gradient(
            self.trial.gathered(padded) if self.trial is not None else self.sum_over_replicas(padded)
        )
        whole = tf.cast(whole, own.dtype)
        result = tf.concat([whole[:before], own, whole[before + rows * times :]], 0)
        result.set_shape([None, *value.shape[1:]])
        return result

    @contextlib.contextmanager
    def computing_whole(self) -> Iterator[None]:
        """Compute as on one device in this context."""
        with _set(replace(self, is_whole=True)):
            yield

    @contextlib.contextmanager
    def weighted_by(self, weight: tf.Tensor) -> Iterator[None]:
        """Compute means over a mask or weights, of which this replica has the given part, in this context."""
        with _set(replace(self, weight=weight)):
            yield


@tf.custom_gradient
def _with_scaled_gradient(value: tf.Tensor, share: tf.Tensor) -> Any:
    def scaled(gradient: tf.Tensor) -> Any:
        return tf.math.divide_no_nan(gradient, tf.cast(share, gradient.dtype)), None

    return tf.identity(value), scaled


@contextlib.contextmanager
def _set(share: ReplicaShare) -> Iterator[None]:
    before = getattr(_local, "current", None)
    _local.current = share
    try:
        yield
    finally:
        _local.current = before


@contextlib.contextmanager
def replica_share(share: ReplicaShare) -> Iterator[None]:
    """Make Keras's losses, metrics and random numbers those of this replica's rows of the global batch."""
    # at least 1: there is a stand-in row, and code divides by the number
    place = RowPlace(share.start, tf.maximum(tf.cast(share.rows, tf.int64), 1), tf.cast(share.total, tf.int64))
    with _set(share), numbers_for(place):
        yield


def current() -> ReplicaShare | None:
    """Return the share of the replica whose step is being traced in this thread, or None outside of one."""
    return getattr(_local, "current", None)


def current_share() -> tf.Tensor | None:
    """Return this replica's part of the rows of the global batch, or None outside `replica_share`."""
    share = current()
    return None if share is None else share.share


def global_rows() -> tf.Tensor | None:
    """Return the number of examples of the global batch, or None outside `replica_share`."""
    share = current()
    return None if share is None else share.total


def has_rows(value: tf.Tensor) -> tf.Tensor:
    """Return the value, or zero in a replica whose only row is a stand-in."""
    share = current()
    return value if share is None else tf.where(share.rows > 0, value, tf.zeros_like(value))
