"""Makes the metrics of several replicas add up to those of one device; see `strategies.replica.share`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from distlaunch.patches.keras_overrides import insert_class
from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.share import Reduction, ReplicaShare, current_replica_share

PATCH = Patch(
    symbols=(
        Symbol("keras.metrics.Mean.update_state", "(self, values, sample_weight=None)"),
        Symbol("keras.metrics.MeanMetricWrapper"),
        Symbol("keras.Metric"),
    ),
    why="A mean that gets one value per batch, such as the loss, would weight all replicas equally, whatever their "
    "number of rows. Keras also adds up the states of all metrics, even of those that are not sums.",
    until="Keras weights such a value by the replica's rows, and lets metrics define how their states are merged.",
)


@functools.cache
def install() -> None:
    """Make `Mean` weight the one value of a batch by the replica's fraction of the rows; a second call does nothing."""
    PATCH.check()
    update = keras.metrics.Mean.update_state

    @functools.wraps(update)
    def update_by_share(self: Any, values: Any, sample_weight: Any = None) -> None:
        share = current_replica_share()
        if share is not None and not share.has_all_rows:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0 and sample_weight is None:
                # a step of `loop: custom` may pass its part of a sum, but a metric function computes from rows
                if share.kind.scale == "part" and not isinstance(self, keras.metrics.MeanMetricWrapper):
                    values = _scale_scalar(share, self.total.path, values)
                # together the replicas count the batch once, as one device does
                sample_weight = share.row_fraction
                values = tf.where(share.rows > 0, values, tf.zeros_like(values))
        return update(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_by_share


def _scale_scalar(share: ReplicaShare, path: str, value: Any) -> Any:
    """Return a value that a step of `loop: custom` passes to a `Mean`, scaled for the convention `mean`."""
    if share.trial is not None:
        share.trial.record("scalar", (path,), value)
    return share.scale_sum(value) if share.kind.reductions.scalars.get(path) is Reduction.SUM else value


def single_metrics(metrics: list[Any]) -> Iterator[Any]:
    """Yield the metrics themselves, in place of Keras's containers of compiled metrics."""
    seen: set[int] = set()
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        for one in single_metrics(inner) if isinstance(inner, list) else (metric,):
            if id(one) not in seen:
                seen.add(id(one))
                yield one


def adds_up(metric: Any) -> bool | None:
    """Return whether a metric's states are sums over rows, as it declares or as is known of Keras; None if unknown."""
    declared = getattr(metric, "additive", None)
    return declared if declared is not None else _is_known_to_add_up(metric) or None


def _is_known_to_add_up(metric: Any) -> bool:
    """Return whether this is one of Keras's own metrics whose states are sums over rows."""
    if not type(metric).__module__.startswith("keras."):
        return False
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    function = getattr(metric, "_fn", None)
    return getattr(function, "__module__", "").startswith("keras.") and not compares_rows(metric)


def compares_rows(part: Any) -> bool:
    """Return whether the argument `axis` of a loss or metric of Keras may be the dimension of the rows.

    Args:
        part: an object that wraps a function, or a `functools.partial` of one.
    """
    arguments = part.keywords if isinstance(part, functools.partial) else getattr(part, "_fn_kwargs", {})
    axis = arguments.get("axis", -1)
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    # None is all dimensions, and the number of dimensions is unknown here
    return any(one is None or one == 0 or one < -1 for one in axes)


def watch_updates(
    metric: Any, watch: Callable[[Any, Callable[..., None], tuple[Any, ...], dict[str, Any]], None]
) -> None:
    """Call a function instead of each update of a metric, with the original update and its arguments."""
    PATCH.check()

    class Watched:
        def update_state(self, *args: Any, **kwargs: Any) -> None:
            watch(self, super().update_state, args, kwargs)  # type: ignore[misc]

    insert_class(metric, Watched)
