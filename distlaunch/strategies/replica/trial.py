"""Finds out how the losses, metrics and logs of a model add up over replicas, on rows of the first batch.

The step is computed on all rows, and then on two unequal parts of them, each as in a replica. If the value for all rows
is the mean of the parts' values, weighted by rows, replicas use the mean. If it is the sum of the parts' values, they
use the sum. Otherwise, it must be computed from all rows. Nothing is assigned: variables keep their values, and
optimizers are not applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import any_rows, num_rows, slice_rows
from distlaunch.patches.keras_private import layers_of
from distlaunch.patches.symbols import replaced_attributes
from distlaunch.strategies.collected_scope import CollectedScope
from distlaunch.strategies.patches.keras_losses import adds_only_means
from distlaunch.strategies.patches.keras_replica_metrics import adds_up, compares_rows
from distlaunch.strategies.replica.share import (
    Reduction,
    Reductions,
    ReplicaShare,
    StepKind,
    current_replica_share,
    replica_share,
)
from distlaunch.strategies.variables import flat_logs, metric_results, optimizers_of, overrides_method

TOLERANCE = 1e-5
"""Relative deviation below which two values count as equal; larger than deviations by rounding."""
TOLERANCE_16_BITS = 2e-2
"""The same tolerance for layers that compute in 16 bits."""
GRADIENT_TOLERANCE = 1e-3
"""The same tolerance for gradients, in which differences of large numbers may cancel."""
MAX_ROWS = 64
"""Largest number of rows of the first batch that are used."""
Key = tuple[str, ...]


class StepTrial:
    """Values of a step that is computed on all rows and then on the parts."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._optimizers = optimizers_of(model)
        self._sums: list[tf.Tensor] = []
        self.has_all_rows = True
        self._at_sum = 0
        self._calls: dict[Key, int] = {}
        self.values: dict[Key, list[tf.Tensor]] = {}
        self.gradients: dict[Key, list[Any]] = {}
        self.states: dict[Key, list[tf.Tensor]] = {}
        self.bytes_per_row: dict[int, int] = {}

    def begin(self, *, has_all_rows: bool) -> None:
        """Begin the computation of all rows, or of the next part."""
        self.has_all_rows, self._at_sum = has_all_rows, 0
        self._calls = {}

    # what replicas would exchange

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Return the sum over all parts, which the computation of all rows has recorded at the same point."""
        if self.has_all_rows:
            self._sums.append(value)
            return value
        self._at_sum += 1
        return self._sums[self._at_sum - 1]

    # what the step computes

    def record(self, kind: str, place: tuple[Any, ...], value: Any) -> None:
        """Record a value for all rows, or for the next part.

        Args:
            kind: `loss`, `added`, `total`, `log`, `metric` (change of a variable), `scalar`, `result` or `entries`.
            place: identifies the value among those of its kind.
        """
        key = (kind, *map(str, place))
        # a step may reach the same point several times
        number = self._calls[key] = self._calls.get(key, 0) + 1
        self.values.setdefault((*key, str(number)), []).append(tf.cast(tf.convert_to_tensor(value), tf.float32))

    def record_states(
        self, index: int, base: list[Any], whole: list[Any], joined: list[Any], *, counts: bool = True
    ) -> None:
        """Record how much the state `joined` of a metric deviates from `whole`, and the change from `base` to `whole`.

        Args:
            base: variables before the updates.
            whole: variables after an update with all rows.
            joined: variables computed from updates with the parts.
            counts: whether the change is recorded.
        """
        pairs = zip(base, whole, joined, strict=True)
        found = [(_deviation(b, a, a), _deviation(a, c, a)) for c, a, b in pairs]
        worst = [tf.reduce_max([one[0] for one in found]), tf.reduce_max([one[1] for one in found])]
        self.states.setdefault(("metric", str(index)), []).append(tf.stack([worst[0], worst[1] if counts else 0.0]))

    def record_gradients(self, optimizer: Any, gradients: list[Any]) -> None:
        place = next((i for i, known in enumerate(self._optimizers) if known is optimizer), len(self._optimizers))
        call = self._calls[key] = self._calls.get(key := ("gradients", str(place)), 0) + 1
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                self.record("entries", (place, index), tf.shape(gradient.indices)[0])
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        self.gradients.setdefault((*key, str(call)), []).append(dense)


def _deviation(value: Any, expected: Any, scale: Any) -> tf.Tensor:
    value, expected, scale = (tf.cast(part, tf.float32) for part in (value, expected, scale))
    return tf.reduce_max(tf.abs(value - expected)) / tf.maximum(tf.reduce_max(tf.abs(scale)), 1e-6)


@dataclass(frozen=True)
class Observed:
    """Host values of a trial.

    Attributes:
        values: for each key, the value for all rows, and then the values for the two parts.
        gradients: for each call of an optimizer, the deviations of the gradients from the mean and from the sum of the
            parts' gradients, relative to the largest gradient of the variable.
        states: for each metric whose updates were tried, pairs of (deviation, change); see `StepTrial.record_states`.
        shares: fractions of the rows in the two parts.
        tolerance: relative deviation up to which values count as equal.
        bytes_per_row: bytes of an update's arguments for each row, by the metric's index.
    """

    values: dict[Key, list[np.ndarray]]
    gradients: dict[Key, np.ndarray]
    states: dict[Key, np.ndarray]
    shares: np.ndarray
    tolerance: float = TOLERANCE
    bytes_per_row: dict[int, int] = field(default_factory=dict)

    def reduction_of(self, key: Key) -> Reduction | None:
        """Return how the values of a key add up; None if that is unknown because all values are zero."""
        whole, *parts = self.values[key]
        if len(parts) != 2 or any(part.shape != whole.shape for part in parts):
            # one value per row: the parts' values together are the values of all rows
            joined = np.concatenate([np.atleast_1d(part) for part in parts]) if parts else np.zeros(0)
            return Reduction.MEAN if joined.shape == whole.shape and self.is_close(joined, whole) else Reduction.WHOLE
        if not any(np.any(value) for value in (whole, *parts)):
            return None
        mean = sum(share * part for share, part in zip(self.shares, parts, strict=True))
        if self.is_close(mean, whole):
            return Reduction.MEAN
        return Reduction.SUM if self.is_close(parts[0] + parts[1], whole) else Reduction.WHOLE

    def is_close(self, value: Any, expected: Any) -> bool:
        """Return whether two values differ by rounding only; False if a value is not finite."""
        scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-6)
        return bool(np.all(np.abs(value - expected) <= self.tolerance * scale))

    def keys(self, kind: str) -> list[Key]:
        """Return the keys of one kind, such as `loss`."""
        return [key for key in self.values if key[0] == kind]


class MetricWatch:
    """Handles the updates of metrics that may not add up over replicas.

    Attributes:
        metrics: all metrics of the model.
    """

    def __init__(self, metrics: list[Any]) -> None:
        self.metrics = metrics

    def index_of(self, metric: Any) -> int:
        return next(index for index, known in enumerate(self.metrics) if known is metric)

    def update(self, metric: Any, update: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update a metric with this replica's rows, or with the rows of all replicas if its states do not add up."""
        at = current_replica_share()
        if at is None or at.has_all_rows:
            return update(*args, **kwargs)
        if self.index_of(metric) in at.kind.reductions.metrics:
            if at.trial is not None:
                leaves = keras.tree.flatten((args, kwargs))
                at.trial.bytes_per_row[self.index_of(metric)] = sum(map(_bytes_of_row, leaves))
            args, kwargs = _map(at.gather_rows, (args, kwargs))
            with at.as_one_device():
                return update(*args, **kwargs)
        if at.trial is not None and at.trial.has_all_rows:
            _try_states(metric, self.index_of(metric), update, args, kwargs, at)
        return update(*args, **kwargs)


def _try_states(
    metric: Any,
    index: int,
    update: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    at: ReplicaShare,
) -> None:
    """Record whether state(A + B) = state(A) + state(B) - state, for several states, predictions and both orders.

    A and B are parts of the rows, and `state` is the state before the update.
    """
    trial, variables = at.trial, metric.variables
    assert trial is not None
    leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    if not leaves:
        return
    rows = tf.shape(leaves[0], tf.int64)[0]
    split_row = tf.maximum(rows // 3, 1)
    start = [tf.convert_to_tensor(variable) for variable in variables]

    def after(state: list[Any], given: Any, first: Any, stop: Any) -> list[Any]:
        part = ReplicaShare(
            tf.cast(stop - first, tf.float32), tf.cast(rows, tf.float32), first, at.kind, trial=StepTrial(trial.model)
        )
        own_args, own_kwargs = _map(lambda leaf: _rows_of(leaf, rows, first, stop), given)
        mapping = list(zip(variables, state, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope, replica_share(part):
            update(*own_args, **own_kwargs)
        values = [scope.get_current_value(variable) for variable in variables]
        return [old if new is None else new for new, old in zip(values, state, strict=True)]

    changed = _with_other_predictions(args), kwargs
    given, zero = (args, kwargs), tf.zeros_like(rows)
    first = after(start, changed, zero, rows)
    bases = [first, after(first, given, zero, split_row)]
    for base in bases:
        for data in (given, changed):
            whole, front, back = (
                after(base, data, zero, rows),
                after(base, data, zero, split_row),
                after(base, data, split_row, rows),
            )
            joined = [a + b - c for a, b, c in zip(front, back, base, strict=True)]
            trial.record_states(index, base, whole, joined)
            # B first, then A
            trial.record_states(
                index, base, after(after(base, data, split_row, rows), data, zero, split_row), joined, counts=False
            )


def _bytes_of_row(leaf: Any) -> int:
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return 0
    return int(np.prod([size or 1 for size in leaf.shape[1:]])) * leaf.dtype.size


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    return keras.tree.map_structure(function, structure)


def _rows_of(leaf: Any, rows: tf.Tensor, first: Any, stop: Any) -> Any:
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    times = tf.shape(leaf, tf.int64)[0] // rows
    return leaf[first * times : stop * times]


def _with_other_predictions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an update with other predictions: those of the rows in reverse order, times 1.5."""
    place = 1 if len(args) > 1 else 0

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        turned = tf.reverse(leaf, [0])
        return turned * 1.5 if leaf.dtype.is_floating else turned

    return tuple(keras.tree.map_structure(other, arg) if index == place else arg for index, arg in enumerate(args))


def needs_trial(model: keras.Model, metrics: list[Any]) -> bool:
    """Return whether anything in a model may not add up over replicas."""
    if any(overrides_method(model, name) for name in ("train_step", "test_step", "compute_loss", "compute_metrics")):
        return True
    if not all(map(adds_up, metrics)):
        return True
    if any(isinstance(layer, keras.layers.Embedding) for layer in layers_of(model)):
        return True  # replicas may have gradients for the same or for different rows, see `Reductions.same_rows`
    return losses_need_trial(model)


def losses_need_trial(model: keras.Model) -> bool:
    """Return whether a loss in Keras's own steps may not add up over replicas."""
    if overrides_method(model, "compute_loss"):
        return True
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return not all(map(_is_known, losses)) or any(map(_may_add_losses, layers_of(model)))


def _is_known(loss: Any) -> bool:
    """Return whether a loss is None, or a Keras loss that is a mean of the losses of single rows."""
    if loss is None or isinstance(loss, str):
        loss = loss and keras.losses.get(loss)
    if loss is None:
        return True
    if isinstance(loss, keras.losses.Loss):
        known = type(loss).__module__.startswith("keras.") and loss.reduction not in ("sum", "none", None)
        across = getattr(getattr(loss, "fn", None), "__name__", "") in _LOSSES_ACROSS_ROWS or compares_rows(loss)
        return known and not across
    if compares_rows(loss):
        return False
    function = getattr(loss, "func", loss)
    return getattr(function, "__module__", "").startswith("keras.") and function.__name__ not in _LOSSES_ACROSS_ROWS


_LOSSES_ACROSS_ROWS = ("dice", "tversky", "circle")
"""Keras losses that can compare rows with each other, depending on their arguments."""


def _may_add_losses(layer: Any) -> bool:
    """Return whether a layer regularizes its output in a user's way, or the code of its class mentions `add_loss`.

    Code that this search misses is found when the step is traced; see `StepKind.met`.
    """
    if layer.activity_regularizer is not None and not adds_only_means(layer):
        return True
    classes = [cls for cls in type(layer).__mro__ if not cls.__module__.startswith(("keras.", "builtins"))]
    functions = (value for cls in classes for value in vars(cls).values())
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(code is not None and "add_loss" in code.co_names for code in codes)


def find_reductions(
    strategy: Any, model: keras.Model, step: Callable[[Any], Any], kind: StepKind, metrics: list[Any], rows: Any
) -> tuple[Reductions, list[str]]:
    """Find out how the losses, metrics and logs of a step add up over replicas.

    Args:
        strategy: the `tf.distribute.Strategy` under which the model was created.
        step: a training or evaluation step, a function of a batch.
        kind: how the step treats losses; the findings are added to `kind.reductions`.
        metrics: the model's metrics, one by one.
        rows: some rows of the first batch, in the structure of a batch.

    Returns:
        The findings, and notes for the user about values that differ from one device or are expensive to compute.

    Raises:
        ConfigError: a layer adds a loss that is neither a mean nor a sum over rows.
    """
    found = kind.reductions
    while True:
        observed = _observe(strategy, model, step, kind, metrics, rows)
        if not _add_findings(observed, kind, model, metrics):
            return found, list(_notes(observed, kind, model, metrics))


def _flatten_with_specs(rows: Any) -> tuple[list[Any], list[Any]]:
    """Return the leaves of a batch, and their specifications for any number of rows."""
    leaves = [
        leaf if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) else tf.convert_to_tensor(leaf)
        for leaf in tf.nest.flatten(rows)
    ]
    return leaves, [any_rows(leaf) for leaf in leaves]


def _observe(
    strategy: Any, model: keras.Model, step: Callable[[Any], Any], kind: StepKind, metrics: list[Any], rows: Any
) -> Observed:
    leaves, signature = _flatten_with_specs(rows)
    bytes_per_row: dict[int, int] = {}

    def in_replica(batch: Any) -> dict[str, Any]:
        trial = StepTrial(model)
        trial.bytes_per_row = bytes_per_row
        number = num_rows(batch)
        split_row, zero = tf.maximum(number // 3, 1), tf.zeros_like(number)
        for first, stop in ((zero, number), (zero, split_row), (split_row, number)):
            trial.begin(has_all_rows=stop is number and first is zero)
            counts = tf.cast(stop - first, tf.float32), tf.cast(number, tf.float32), first
            part = batch if trial.has_all_rows else slice_rows(batch, first, stop)
            with CollectedScope() as scope, replica_share(ReplicaShare(*counts, kind, trial=trial)):
                for metric in metrics:
                    metric.reset_state()
                begins = {id(v): scope.get_current_value(v) for metric in metrics for v in metric.variables}
                logs = step(part)
                for name, value in (flat_logs(logs) if isinstance(logs, dict) else {}).items():
                    trial.record("log", (name,), tf.reduce_mean(tf.cast(value, tf.float32)))
                for index, metric in enumerate(metrics):
                    for place, variable in enumerate(metric.variables):
                        ended = tf.convert_to_tensor(scope.get_current_value(variable))
                        begun = tf.convert_to_tensor(begins[id(variable)])
                        trial.record("metric", (index, place), tf.cast(ended, tf.float32) - tf.cast(begun, tf.float32))
                if trial.has_all_rows:
                    for name, value in metric_results(model).items():
                        trial.record("result", (name,), value)
        shares = tf.stack([split_row, number - split_row]) / number
        gradients = {
            key: _gradient_deviations(parts, tf.cast(shares, tf.float32)) for key, parts in trial.gradients.items()
        }
        return {
            "values": {json.dumps(key): values for key, values in trial.values.items()},
            "gradients": {json.dumps(key): value for key, value in gradients.items()},
            "states": {json.dumps(key): tf.stack(values) for key, values in trial.states.items()},
            "shares": shares,
        }

    @tf.function(input_signature=signature, autograph=False)
    def call(*given: tf.Tensor) -> Any:
        batch = tf.nest.pack_sequence_as(rows, list(given))
        result = strategy.run(in_replica, args=(batch,))
        return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], result)

    norms = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    # use the statistics of all rows here: replicas use their own, but this is a documented difference, and must not
    # be attributed to losses or metrics
    with replaced_attributes((layer, "synchronized", True) for layer in norms):
        found = call(*leaves)

    def on_host(part: Any) -> dict[Key, Any]:
        return {tuple(json.loads(key)): tf.nest.map_structure(lambda one: one.numpy(), v) for key, v in part.items()}

    values, gradients, states = (on_host(found[part]) for part in ("values", "gradients", "states"))
    short = any(getattr(layer, "compute_dtype", "") in ("float16", "bfloat16") for layer in layers_of(model))
    return Observed(
        values, gradients, states, found["shares"].numpy(), TOLERANCE_16_BITS if short else TOLERANCE, bytes_per_row
    )


def _gradient_deviations(parts: list[list[Any]], shares: tf.Tensor) -> tf.Tensor:
    """Return the largest deviations of gradients from the mean and from the sum of the parts' gradients."""
    if len(parts) != 3:
        return tf.constant([np.inf, np.inf], tf.float32)
    found = []
    for whole, one, other in zip(*parts, strict=True):
        if whole is None or one is None or other is None:
            continue
        whole, one, other = (tf.cast(value, tf.float32) for value in (whole, one, other))
        mean = shares[0] * one + shares[1] * other
        found.append(tf.stack([_deviation(mean, whole, whole), _deviation(one + other, whole, whole)]))
    return tf.reduce_max(tf.stack(found), 0) if found else tf.zeros([2])


def findings_to_json(kinds: list[StepKind]) -> bytes:
    """Return the findings about some steps as JSON, to send them to other processes."""
    found = kinds[0].reductions
    plain = {
        "losses": [[place, reduction.value] for place, reduction in found.losses.items()],
        "added": [[*place, reduction.value] for place, reduction in found.added.items()],
        "total": found.total.value,
        "metrics": sorted(found.metrics),
        "scalars": sorted(found.scalars),
        "same_rows": sorted(found.same_rows),
        "logs": [{name: reduction.value for name, reduction in kind.logs.items()} for kind in kinds],
    }
    return json.dumps(plain).encode()


def adopt_findings(kinds: list[StepKind], text: bytes) -> None:
    """Replace the findings about some steps, which share one `reductions`, by those in the JSON."""
    plain, found = json.loads(text), kinds[0].reductions
    found.losses = {place: Reduction(reduction) for place, reduction in plain["losses"]}
    found.added = {(path, number): Reduction(reduction) for path, number, reduction in plain["added"]}
    found.total, found.metrics = Reduction(plain["total"]), set(plain["metrics"])
    found.scalars = dict.fromkeys(plain["scalars"], Reduction.SUM)
    found.same_rows = {(place, index) for place, index in plain["same_rows"]}
    for kind, logs in zip(kinds, plain["logs"], strict=True):
        kind.logs.clear()
        kind.logs.update({name: Reduction(reduction) for name, reduction in logs.items()})


def metrics_that_do_not_add_up(
    model: keras.Model, step: Callable[[Any], Any], metrics: list[Any], rows: Any
) -> list[Any]:
    """Return the metrics whose state after two batches is not the sum of the states after each batch.

    Args:
        step: an evaluation step, a function of a batch.
        metrics: the metrics to test.
        rows: some rows of the first batch, in the structure of a batch.
    """
    leaves, signature = _flatten_with_specs(rows)
    variables = [variable for metric in metrics for variable in metric.variables]

    @tf.function(input_signature=signature, autograph=False)
    def call(*given: tf.Tensor) -> list[tf.Tensor]:
        batch = tf.nest.pack_sequence_as(rows, list(given))
        number = num_rows(batch)
        split_row, zero = tf.maximum(number // 3, 1), tf.zeros_like(number)
        halves = [slice_rows(batch, zero, split_row), slice_rows(batch, split_row, number)]

        def states(*parts: Any) -> list[tf.Tensor]:
            with CollectedScope() as scope:
                for metric in metrics:
                    metric.reset_state()
                for part in parts:
                    step(part)
                return [tf.cast(scope.get_current_value(variable), tf.float32) for variable in variables]

        fresh, one, other = states(), states(halves[0]), states(halves[1])
        joined = [a + b - c for a, b, c in zip(one, other, fresh, strict=True)]
        both = [states(*halves), states(*reversed(halves))]
        return [
            tf.maximum(_deviation(ahead, sum_, sum_), _deviation(behind, sum_, sum_))
            for ahead, behind, sum_ in zip(*both, joined, strict=True)
        ]

    deviating = {id(v) for v, value in zip(variables, call(*leaves), strict=True) if float(value) > TOLERANCE}
    return [metric for metric in metrics if any(id(variable) in deviating for variable in metric.variables)]


def _add_findings(observed: Observed, kind: StepKind, model: keras.Model, metrics: list[Any]) -> bool:
    """Add the observations to the findings; return whether another trial of the step can find more."""
    found = kind.reductions
    losses = {int(key[1]): observed.reduction_of(key) for key in observed.keys("loss")}
    # zeros do not show how a loss adds up, but computing it from all rows is always correct
    losses = {place: Reduction.WHOLE if reduction is None else reduction for place, reduction in losses.items()}
    losses = {
        place: reduction
        for place, reduction in losses.items()
        if reduction is not Reduction.MEAN and place not in found.losses
    }
    added = {(key[1], int(key[2])): observed.reduction_of(key) or Reduction.MEAN for key in observed.keys("added")}
    added = {
        place: reduction
        for place, reduction in added.items()
        if reduction is not Reduction.MEAN and place not in found.added
    }
    if losses or added:
        for (path, _), reduction in added.items():
            if reduction is Reduction.WHOLE:
                raise ConfigError(Problem(("strategy", "kind"), _layer_error(path)))
        found.losses.update(losses)
        found.added.update(added)
        return True
    if overrides_method(model, "compute_loss"):
        totals = [observed.reduction_of(key) for key in observed.keys("total")]
        total = (
            next((reduction for reduction in totals if reduction is not Reduction.MEAN), Reduction.MEAN)
            or Reduction.WHOLE
        )
        if total is not Reduction.MEAN and found.total is Reduction.MEAN:
            found.total = total
            return True
    scalars = {key[1]: observed.reduction_of(key) for key in observed.keys("scalar")}
    sums = {path: Reduction.SUM for path, reduction in scalars.items() if reduction is Reduction.SUM}
    if not sums.keys() <= found.scalars.keys():
        found.scalars.update(sums)
        return True
    is_keras_step = kind.scale == "mean" and not kind.weighs_gradients
    if is_keras_step and any(of_sum > GRADIENT_TOLERANCE for _, of_sum in observed.gradients.values()):
        # losses may be close by chance, but gradients are not
        if overrides_method(model, "compute_loss") and found.total is not Reduction.WHOLE:
            found.total = Reduction.WHOLE
            return True
        known = [_is_known(loss) for loss in keras.tree.flatten(getattr(model, "loss", None))]
        places = {int(key[1]) for key in observed.keys("loss")}
        doubtful = {place for place in places if len(known) != len(places) or not known[place]}
        if doubtful and any(found.losses.get(place) is not Reduction.WHOLE for place in doubtful):
            found.losses.update(dict.fromkeys(doubtful, Reduction.WHOLE))
            return True
    more = {
        index
        for index in range(len(metrics))
        if index not in found.metrics and _needs_all_rows(observed, metrics, index)
    }
    found.metrics |= more
    if more:
        return True
    for key in observed.keys("entries"):
        whole, *parts = observed.values[key]
        if parts and all(part == whole for part in parts):
            found.same_rows.add((int(key[1]), int(key[2])))
    results = {key[1]: values[0] for key, values in observed.values.items() if key[0] == "result"}
    for key in observed.keys("log"):
        name = key[1]
        is_result = name in results and observed.is_close(observed.values[key][0], results[name])
        kind.logs[name] = Reduction.RESULT if is_result else observed.reduction_of(key) or Reduction.MEAN
    return False


def _needs_all_rows(observed: Observed, metrics: list[Any], index: int) -> bool:
    decided = adds_up(metrics[index])
    if decided is not None:
        return not decided
    tried = observed.states.get(("metric", str(index)))
    if tried is None:
        return False  # the step does not update this metric with rows
    unequal = any(observed.reduction_of(key) not in (Reduction.SUM, None) for key in _keys_of(observed, index))
    return unequal or bool(np.any(tried[:, 0] > observed.tolerance)) or not np.any(tried[:, 1] > 0)


def _keys_of(observed: Observed, index: int) -> list[Key]:
    return [key for key in observed.keys("metric") if key[1] == str(index)]


def _layer_error(path: str) -> str:
    return (
        f"the layer '{path}' adds a loss (`add_loss` or `activity_regularizer`) that is neither a mean nor a sum over "
        "rows, so replicas cannot compute the loss of the global batch; add a mean or a sum over rows, or use "
        "one_device, dtensor or jax, where the layer gets all rows"
    )


def _notes(observed: Observed, kind: StepKind, model: keras.Model, metrics: list[Any]) -> Iterator[str]:
    """Yield a note for each value that differs from one device, or that is expensive to compute."""
    name, found = type(model).__name__, kind.reductions
    for key, (of_mean, of_sum) in observed.gradients.items():
        # Keras's own step weights the loss, so its gradients are summed
        if (of_mean if kind.weighs_gradients else of_sum) <= GRADIENT_TOLERANCE:
            continue
        which = f"optimizer {int(key[1]) + 1}" if len(optimizers_of(model)) > 1 else "the optimizer"
        if kind.scale == "part":
            # 16 bits round the gradients of small parts too much to tell
            if observed.tolerance == TOLERANCE:
                yield _note_of_parts(which, is_mean=of_mean <= GRADIENT_TOLERANCE)
            continue
        if overrides_method(model, "train_step"):
            if of_sum <= GRADIENT_TOLERANCE:
                what = "are sums over rows, but replicas average them; divide the loss by the number of rows"
            else:
                what = (
                    "do not add up over replicas: the gradients of a batch are not the mean of its parts' gradients "
                    "(for example with a masked mean, clipped gradients or a loss that compares rows)"
                )
            yield (
                f"{name}.train_step: the gradients that {which} gets {what}; this run differs from one device. "
                "With dtensor or jax, the step gets all rows"
            )
        elif not overrides_method(model, "compute_loss") and not found.losses:
            yield "the model combines rows of a batch, so its gradients on replicas differ from one device"
    for index in sorted(found.metrics):
        size = observed.bytes_per_row.get(index, 0)
        yield (
            f"metric '{metrics[index].name}' does not add up over replicas, so it is computed from the rows of all "
            f"replicas ({size:,} bytes per example)"
        )
    for log, reduction in kind.logs.items():
        if kind.scale == "part":
            if reduction is not Reduction.SUM and any(np.any(value) for value in observed.values["log", log, "1"]):
                yield (
                    f"the value '{log}' that the training step returns is the sum over replicas, which differs from "
                    "one device; use context.average or context.sum for it, or a metric"
                )
        elif reduction is Reduction.WHOLE:
            what = "each replica evaluates whole batches" if kind.is_test else "the mean over replicas is shown"
            step = "test_step" if kind.is_test else "train_step"
            yield f"{name}: the value '{log}' of {step} does not add up over replicas, so {what}"
    for index, metric in enumerate(metrics):
        is_decided = index in found.metrics or getattr(metric, "additive", None) is not None
        wrong = not is_decided and any(
            observed.reduction_of(key) not in (Reduction.SUM, None) for key in _keys_of(observed, index)
        )
        if wrong:
            step = "the training step" if kind.scale == "part" else name
            yield f"metric '{metric.name}' is updated by {step} with values that do not add up over replicas"


def _note_of_parts(optimizer: str, *, is_mean: bool) -> str:
    what = (
        "are means over rows, but replicas sum them"
        if is_mean
        else "do not add up over replicas: the gradients of a batch are not the sum of its parts' gradients"
    )
    return (
        f"the training step: the gradients that {optimizer} gets {what}; this run differs from one device. Build the "
        "loss from context.average, context.sum and context.regularization, or use dtensor or jax, where the step gets "
        "all rows"
    )
