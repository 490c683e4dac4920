"""Sums over the replicas of one process: additions, and collectives for what is sparse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from distlaunch.patches.tensorflow_collectives import mirrored_strategy
from distlaunch.strategies.replica.peer_sums import CollectiveSums, MergedSums

pytestmark = pytest.mark.usefixtures("virtual_devices")


def summed_directly(sums: Any, value: tf.Tensor) -> Any:
    return sums.all_reduce([value, tf.cast(value, tf.int64)])[0]


def summed_sparsely(sums: Any, value: tf.Tensor) -> Any:
    (found,) = sums.all_reduce([tf.IndexedSlices(value[None], tf.constant([0]), tf.constant([1, 2]))])
    return tf.convert_to_tensor(found)[0]


@pytest.mark.parametrize("summed", [summed_directly, summed_sparsely])
@pytest.mark.parametrize("replicas", [2, 3])
def test_each_replica_gets_the_sum(summed: Any, replicas: int) -> None:
    strategy = mirrored_strategy([f"CPU:{index}" for index in range(replicas)])
    sums = MergedSums(CollectiveSums(is_timed=False))

    def step() -> tf.Tensor:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return tf.identity(summed(sums, tf.stack([number, 0.5])))

    run = tf.function(lambda: [tf.identity(each) for each in strategy.experimental_local_results(strategy.run(step))])
    expected = [replicas * (replicas - 1) / 2, replicas / 2]
    np.testing.assert_array_equal([each.numpy() for each in run()], [expected] * replicas)
    operations = {operation.type for operation in run.get_concrete_function().graph.get_operations()}
    assert any(each.startswith("Collective") for each in operations) == (summed is summed_sparsely)
