"""Split variables act as whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from distlaunch.config.strategies.parameter_server import Partitioner  # noqa: E402
from distlaunch.strategies.parameter_server.partition import (  # noqa: E402
    Shards,
    make_partitioner,
    num_shards,
    shard_bounds,
    show_shards,
)
from distlaunch.strategies.patches.keras_whole_weights import join_split_weights  # noqa: E402

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


def test_weights_come_out_whole(virtual_devices: None, tmp_path) -> None:
    """A model with split variables returns and saves whole weights, and takes and loads those of a whole model."""
    keras = pytest.importorskip("keras")

    class Scale(keras.layers.Layer):
        """Keras writes its variables by their position."""

        def build(self, shape):
            self.offset = self.add_weight(shape=(shape[-1],), name="offset")
            self.factor = self.add_weight(shape=(shape[-1],), name="factor", initializer="ones")

        def call(self, x):
            return x * tf.convert_to_tensor(self.factor) + tf.convert_to_tensor(self.offset)

    def made() -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Input((4,)), keras.layers.Dense(7), Scale(), keras.layers.Dense(2)]
        return keras.Sequential(layers)

    def split(next_creator, **kwargs):
        value = kwargs["initial_value"]
        value = tf.convert_to_tensor(value() if callable(value) else value)
        if not value.dtype.is_floating or value.shape.rank == 0:
            return next_creator(**kwargs)
        parts = [value[start:stop] for start, stop in shard_bounds(int(value.shape[0]), 2)]
        return Shards([next_creator(**{**kwargs, "initial_value": part, "shape": part.shape}) for part in parts])

    whole, x = made(), np.ones((8, 4), np.float32)
    whole.set_weights([value + 0.5 for value in whole.get_weights()])
    with tf.variable_creator_scope(split):
        model = made()
    show_shards(model)
    join_split_weights(model)
    assert [value.shape for value in model.get_weights()] == [value.shape for value in whole.get_weights()]
    model.set_weights(whole.get_weights())
    for own, expected in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(own, expected)
    np.testing.assert_allclose(model(x), whole(x), rtol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(4, 7\); got \(7, 4\)"):
        model.set_weights([value.T for value in whole.get_weights()])
    path = tmp_path / "whole.weights.h5"
    whole.save_weights(path)
    model.set_weights([value * 0 for value in whole.get_weights()])
    model.load_weights(path)
    model.save_weights(tmp_path / "split.weights.h5")
    other = made()
    other.load_weights(tmp_path / "split.weights.h5")
    for own, expected in zip(other.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(own, expected)
