"""Split variables act as whole ones."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from distlaunch.config.strategy import Partitioner  # noqa: E402
from distlaunch.strategies.partition import Shards, make_partitioner, num_shards, shard_bounds  # noqa: E402

WHOLE = np.arange(21, dtype=np.float32).reshape(7, 3) - 10


@pytest.fixture
def shards(virtual_devices: None) -> Shards:
    return Shards([tf.Variable(WHOLE[start:stop]) for start, stop in shard_bounds(7, 3)])


def test_the_first_shards_are_longer() -> None:
    assert shard_bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert shard_bounds(2, 2) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    "operation",
    [
        lambda v: -v,
        abs,
        lambda v: v + 1,
        lambda v: 1 - v,
        lambda v: 2 * v,
        lambda v: v / 2,
        lambda v: v**2,
        lambda v: v @ np.ones((3, 2), np.float32),
        lambda v: v > 0,
        lambda v: v[5],
        lambda v: v[2:5, 1],
        tf.transpose,
        np.asarray,
    ],
)
def test_operators(operation, shards: Shards) -> None:
    np.testing.assert_array_equal(operation(shards), operation(tf.constant(WHOLE)))


def test_assigning_and_looking_up(shards: Shards) -> None:
    shards.assign(WHOLE * 2)
    assert [variable.shape[0] for variable in shards.variables] == [3, 2, 2]
    np.testing.assert_array_equal(shards.numpy(), WHOLE * 2)
    np.testing.assert_array_equal(shards.lookup(tf.constant([[6, 0], [3, 3]])), WHOLE[[[6, 0], [3, 3]]] * 2)


@pytest.mark.parametrize(
    ("arguments", "shape", "expected"),
    [
        ({"kind": "fixed_shards", "num_shards": 3}, [10, 4], 3),
        ({"kind": "fixed_shards", "num_shards": 3}, [2, 4], 2),
        ({"kind": "fixed_shards", "num_shards": 3}, [], 1),
        ({"kind": "min_size", "min_shard_bytes": 160, "max_shards": 8}, [100, 4], 8),
        ({"kind": "min_size", "min_shard_bytes": 800, "max_shards": 8}, [100, 4], 2),
        ({"kind": "min_size", "min_shard_bytes": 8000, "max_shards": 8}, [100, 4], 1),
        ({"kind": "max_size", "max_shard_bytes": 400}, [100, 4], 4),
        ({"kind": "max_size", "max_shard_bytes": 400, "max_shards": 3}, [100, 4], 3),
    ],
)
def test_partitioners(arguments: dict, shape: list[int], expected: int) -> None:
    partitioner = make_partitioner(Partitioner(**arguments))
    assert num_shards(partitioner, tf.TensorShape(shape), tf.float32) == expected
