"""Checks, by a small trial, that a `tf.distribute` strategy has the properties on which `ReplicaProgram` relies.

A strategy without these properties would train with wrong losses. An example is
`tf.distribute.experimental.CentralStorageStrategy`, whose replicas share one copy of each variable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.strategies.replica.sums import Replicas


def check_replicas(strategy: Any, replicas: Replicas) -> None:
    """Check the replicas' numbers, sums over replicas, and assignments in each replica; all processes must call it.

    Raises:
        ConfigError: the strategy lacks a property that `ReplicaProgram` needs.
    """
    with strategy.scope():
        metric = tf.Variable(
            tf.constant(0.0),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        statistic = tf.Variable(tf.constant(0.0), trainable=False)
        weight = tf.Variable(tf.constant(0.0), aggregation=tf.VariableAggregation.MEAN)

    def local() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, number + 1)
        metric.assign_add(number + 1)
        statistic.assign(number + 1)
        weight.assign_add(total)
        return tf.stack([number, total, metric.read_value(), statistic.read_value(), weight.read_value()])

    trial = tf.function(lambda: strategy.experimental_local_results(strategy.run(local)), autograph=False)
    try:
        found = np.stack([result.numpy() for result in trial()], axis=1)
    except (ValueError, NotImplementedError) as error:
        raise _refusal(strategy, f"a variable cannot be assigned in a replica: {str(error).splitlines()[0]}") from error
    numbers = np.arange(replicas.first, replicas.first + replicas.local)
    total = np.full(replicas.local, replicas.total * (replicas.total + 1) / 2)
    expected = {
        "the replicas of this process have the wrong numbers": numbers,
        "a sum over all replicas is wrong": total,
        "replicas share the value of a metric's variable": numbers + 1,
        "replicas share the value of a variable without aggregation": numbers + 1,
        "an update that is equal in all replicas does not change a weight exactly once": total,
    }
    for (message, values), received in zip(expected.items(), found, strict=True):
        if not np.array_equal(values, received):
            raise _refusal(strategy, f"{message}: expected {values.tolist()}, got {received.tolist()}")


def _refusal(strategy: Any, reason: str) -> ConfigError:
    message = f"{type(strategy).__name__} lacks a property that replicas in lockstep need, so losses would be wrong"
    return ConfigError(Problem(("strategy", "kind"), f"{message}; {reason}; use kind: mirrored"))
