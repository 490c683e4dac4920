"""Sums over the replicas of all processes: votes, metrics, and other results of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.protocol import Logs, Steps
from distlaunch.strategies.replica.agreement import Ballots
from distlaunch.strategies.replica.peer_sums import CollectiveSums, ReplicaSums
from distlaunch.strategies.replica.share import Reduction, StepKind
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import (
    flat_logs,
    logs_to_host,
    may_return_more,
    metric_results,
    metric_variables,
    named_metrics,
)

_PARTS = "parts/"


@dataclass(frozen=True)
class Replicas:
    """The replicas, of which each process has the same number.

    Attributes:
        total: number of all replicas.
        local: number of those in this process.
        first: index of this process's first one.
        sums: how values are summed over them.
    """

    total: int
    local: int
    first: int
    peers: Peers = field(default_factory=Peers)
    sums: ReplicaSums = field(default_factory=lambda: CollectiveSums(is_timed=False))


class Sums:
    """Sums everything that replicas add up at the end of a graph call, with one all-reduce.

    Args:
        train: how the values of the training step add up.
        test: how the values of the evaluation step add up.
        whole: metrics that each replica computes from all rows, and that are therefore not summed.

    Attributes:
        extras: a variable for each scalar that the training step returns in addition to the model's metrics.
        test_extras: the same for the evaluation step.
    """

    def __init__(
        self,
        strategy: Any,
        steps: Steps,
        replicas: Replicas,
        ballots: Ballots,
        train: StepKind,
        test: StepKind,
        whole: list[Any] | None = None,
    ) -> None:
        self._strategy, self._steps, self._replicas, self._ballots = strategy, steps, replicas, ballots
        self._train, self._test = train, test
        self._gathered = {id(variable) for metric in whole or [] for variable in metric.variables}
        self._model = steps.model
        self._metrics = metric_variables(self._model)
        self.extras: dict[str, tf.Variable] = {}
        self.test_extras: dict[str, tf.Variable] = {}
        self._extras_made = self._test_extras_made = False
        self._sum_call = tf.function(lambda ballot: self.sum(ballot, []), autograph=False)
        # the argument causes another trace after the first step has made the extras; a snapshot may precede that step
        self._parts_call = tf.function(
            lambda num_extras: self._values_per_replica([*self._metrics, *self.extras.values()]), autograph=False
        )

    def agree(self, vote: Vote) -> Vote:
        """Return the combined vote of all processes."""
        if self._replicas.peers.number == 1:
            return vote
        return self._ballots.vote(self._sum_call(self._ballots.cast(vote)))

    def values(self) -> State:
        """Return the sums of variables that replicas add up, and below `parts/` the value of each replica.

        The sums are rounded. A run that resumed from them alone would log slightly different values.
        """
        named = self.partial_variables()
        if not named:
            return {}
        values, parts = {}, self._parts_call(len(self.extras)).numpy()
        ends = np.cumsum([int(np.prod(v.shape)) for v in named.values()])[:-1]
        for (name, variable), part in zip(named.items(), np.split(parts, ends, axis=1), strict=True):
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            value = part[0] if id(variable) in self._gathered else part.sum(axis=0)
            values[name] = value.reshape(variable.shape).astype(dtype)
            if self._replicas.total > 1:
                values[f"{_PARTS}{name}"] = part.reshape(-1, *variable.shape).astype(dtype)
        return values

    def make_extras(self, trace: Callable[..., Any], iterator: Any) -> None:
        """Create variables for scalars that the step returns in addition to the model's metrics.

        The scalars are found by tracing the step once.

        Args:
            trace: a function that runs the step in all replicas on the next element of an iterator.
        """
        if self._extras_made:
            return
        # set even if no scalars are found, because a trace is expensive
        self._extras_made = True
        # Keras's own step returns only the metrics, which are summed anyway
        if self._steps.logs == "mean" or may_return_more(self._model, "train_step"):
            self.extras = self._extras_of(trace, iterator, "log", replaces=self._steps.logs == "last")

    def make_test_extras(self, trace: Callable[..., Any], iterator: Any) -> None:
        """Create the variables of the evaluation step; see `make_extras`."""
        if not self._test_extras_made and may_return_more(self._model, "test_step"):
            self.test_extras = self._extras_of(trace, iterator, "test_log", replaces=True)
        self._test_extras_made = True

    def _extras_of(
        self, trace: Callable[..., Any], iterator: Any, prefix: str, *, replaces: bool
    ) -> dict[str, tf.Variable]:
        returned = tf.function(trace, autograph=False).get_concrete_function(iterator).structured_outputs
        names = set(flat_logs(returned)) if isinstance(returned, dict) else set()
        if replaces and names == set(metric_results(self._model)):
            return {}
        # ON_READ gives each replica its own copy, and the copies are summed at the end of the call
        with self._strategy.scope():
            return {
                name: tf.Variable(
                    tf.constant(0.0),
                    trainable=False,
                    name=f"{prefix}_{name}",
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                for name in sorted(names)  # the order of a set differs between processes
            }

    def store_results(self, returned: dict[str, Any], rows: tf.Tensor, total: tf.Tensor, *, test: bool = False) -> None:
        """Store the results of the latest step in the extras of this replica, so that their sum is the global value."""
        kind, extras = (self._test, self.test_extras) if test else (self._train, self.extras)
        for name, variable in extras.items():
            # a mean, because a step may return one value per example
            value = tf.cast(tf.reduce_mean(returned[name]), variable.dtype)
            if kind.takes_whole_batches:
                value = tf.where(_is_first_replica(), value, tf.zeros_like(value))
            elif kind.logs.get(name) is not Reduction.SUM:
                value = tf.math.multiply_no_nan(value, tf.cast(rows / total, value.dtype))
            variable.assign(tf.where(rows > 0, value, tf.zeros_like(value)))

    def sum(self, ballot: tf.Tensor, variables: list[Any], *, whole: bool = False) -> tf.Tensor:
        """Return one float64 vector of the ballot and the variables' values, summed with one all-reduce.

        Args:
            whole: whether each replica has computed all rows, so that only the first replica's values are used.
        """
        extras = {id(variable) for variable in self.test_extras.values()}

        def local() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            voter = tf.equal(context.replica_id_in_sync_group, self._replicas.first)
            # the first replica of each process votes, so that each process votes once
            parts = [ballot * tf.cast(voter, tf.float64)]
            for variable in variables:
                value = tf.reshape(tf.cast(_tensor(variable), tf.float64), [-1])
                has_all_rows = id(variable) in self._gathered or (whole and id(variable) not in extras)
                parts.append(tf.where(_is_first_replica(), value, tf.zeros_like(value)) if has_all_rows else value)
            # The number of all-reduces costs time, not their size: between two workers, an MLP's gradients take 2.6 ms
            # in one all-reduce, and 4.6 to 5.4 ms in one for each tensor.
            vector = tf.concat(parts, 0)
            return vector if self._replicas.total == 1 else self._replicas.sums.all_reduce([vector])[0]

        return self._strategy.experimental_local_results(self._strategy.run(local))[0]

    def _values_per_replica(self, variables: list[Any]) -> tf.Tensor:
        """Return the variables' values in each replica; float64, shape [replicas, values]."""
        replicas = self._replicas.total

        def local() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            own = tf.concat([tf.reshape(tf.cast(_tensor(v), tf.float64), [-1]) for v in variables], 0)
            here = tf.equal(tf.range(replicas), context.replica_id_in_sync_group)
            rows = tf.where(here[:, None], own[None], tf.zeros([], tf.float64))  # a product with zero would keep NaN
            return rows if replicas == 1 else context.all_reduce(tf.distribute.ReduceOp.SUM, rows)

        return self._strategy.experimental_local_results(self._strategy.run(local))[0]

    def split(self, vector: tf.Tensor, variables: list[Any]) -> list[tf.Tensor]:
        """Split the vector of `sum` into the ballot and each variable's value."""
        ballot, *parts = tf.split(vector, [self._ballots.size, *(int(np.prod(v.shape)) for v in variables)])
        values = [tf.reshape(tf.cast(p, v.dtype), v.shape) for p, v in zip(parts, variables, strict=True)]
        return [ballot, *values]

    @tf.autograph.experimental.do_not_convert
    def collect(
        self, ballot: tf.Tensor, extras: list[tf.Variable], *, whole: bool = False
    ) -> tuple[tf.Tensor, dict[str, Any], list[tf.Tensor]]:
        variables = [*self._metrics, *extras]
        votes, *values = self.split(self.sum(ballot, variables, whole=whole), variables)
        # the sums are not assigned, because each replica continues with its own value
        mapping = list(zip(self._metrics, values, strict=False))
        with keras.StatelessScope(state_mapping=mapping):
            # converted here, because a result may be the variable itself, which has another value outside the scope
            logs = {name: tf.convert_to_tensor(value) for name, value in metric_results(self._model).items()}
        return votes, logs, values[len(self._metrics) :]

    def to_logs(
        self, logs: dict[str, Any], extras: list[tf.Tensor], steps_in_epoch: int, *, test: bool = False
    ) -> Logs:
        """Return the values of a call on the host.

        Args:
            logs: results of the metrics.
            extras: sums of `extras`, or of `test_extras` if `test` is set.
        """
        values = {name: value.numpy() for name, value in logs.items()}
        if not extras:
            return logs_to_host(values)
        kind, names = (self._test, self.test_extras) if test else (self._train, self.extras)
        scale = max(steps_in_epoch, 1) if self._steps.logs == "mean" and not test else 1
        own = {name: value.numpy() / scale for name, value in zip(names, extras, strict=True)}
        if self._steps.logs == "mean" and not test:
            return logs_to_host({**values, **own})
        # as in Keras, the values that the step returns replace the metrics, unless they are results of metrics
        results = {name: values[name] for name in own if kind.logs.get(name) is Reduction.RESULT and name in values}
        return logs_to_host({**own, **results})

    def partial_variables(self) -> dict[str, Any]:
        """Return variables of which each replica holds a part, by name: metrics and logs."""
        return {**named_metrics(self._model), **{f"log/{name}": v for name, v in self.extras.items()}}

    def assign(self, name: str, variable: Any, value: np.ndarray, state: State) -> None:
        """Restore a variable that replicas add up when it is read.

        Args:
            value: the sum.
            state: contains the values of the replicas. If their number has changed, the first replica gets the sum; for
                a metric that each replica computes from all rows, every replica gets it.
        """
        parts = state.get(f"{_PARTS}{name}")
        if parts is None or parts.shape != (self._replicas.total, *value.shape):
            # the number of replicas has changed
            rest = value if id(variable) in self._gathered else np.zeros_like(value)
            parts = np.stack([value, *[rest] * (self._replicas.total - 1)])

        def local() -> None:
            own = tf.distribute.get_replica_context().replica_id_in_sync_group
            variable.assign(tf.constant(parts, variable.dtype)[own])

        self._strategy.run(tf.function(local, autograph=False))


def _is_first_replica() -> tf.Tensor:
    return tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)


def _tensor(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
