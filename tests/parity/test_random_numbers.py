"""Replicas and JAX draw the random numbers of one TensorFlow device, to the last bit."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch.data.batches import Source
from distlaunch.data.rows import split_rows
from distlaunch.strategies.patches import keras_losses
from distlaunch.strategies.replica import share as replica_share
from distlaunch.strategies.replica.row_random import RowOrder, draw_for_rows

pytestmark = pytest.mark.usefixtures("virtual_devices")  # any of these tests may be the first of its process
REPLICAS = 3


class Draws(keras.layers.Layer):
    """Everything that Keras draws by the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x: tf.Tensor) -> list[tf.Tensor]:
        rows, seed, random = keras.ops.shape(x)[0], self.seed, keras.random
        return [
            random.uniform((rows, 3), seed=seed),
            random.normal((rows, 5, 7), seed=seed),
            random.truncated_normal((rows, 3), seed=seed),
            random.randint((rows, 3), 0, 10, seed=seed),
            random.dropout(x, 0.5, seed=seed),
            random.uniform((rows * 2, 3), seed=seed),
            random.uniform((rows, 3), seed=seed, dtype="float16"),
            random.uniform((rows, 3), seed=seed, dtype="float64"),
            random.normal((rows, 3), seed=seed, dtype="bfloat16"),
            random.dropout(keras.ops.ones((rows, 2, 6)), 0.5, noise_shape=(None, 1, 6), seed=seed),
            random.uniform((4, 3), seed=seed),
        ]


@pytest.mark.parametrize("rows", [pytest.param(12, marks=pytest.mark.slow), 7, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_draw_their_rows_of_what_one_device_draws(rows: int) -> None:
    """Even and uneven parts, and a replica without rows; the shape of the last draw does not contain rows."""
    x = np.ones((rows, 5), np.float32)
    *expected, alone = tf.function(Draws(), input_signature=[tf.TensorSpec([None, 5])])(x)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(REPLICAS)])
    keras_losses.install()
    with strategy.scope():
        layer = Draws()
    elements = tf.data.Dataset.from_tensors(x).repeat()
    source = Source(elements, lambda element, at_once: element)
    parts = split_rows(source, first_replica=0, num_local=REPLICAS, num_replicas=REPLICAS)
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: parts))

    @tf.function(autograph=False)
    def call(iterator: Any) -> Any:
        def step(batch: tf.Tensor, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> Any:
            kind = replica_share.StepKind("mean")
            with replica_share.replica_share(replica_share.ReplicaShare(rows, total, start, kind)):
                return layer(batch), rows

        return strategy.run(step, args=next(iterator))

    (*drawn, together), counts = call(iterator)
    for whole, own in zip(expected, drawn, strict=True):
        merged = whole.shape[0] // rows
        parts, sizes = map(strategy.experimental_local_results, (own, counts))
        got = np.concatenate([part.numpy()[: int(n) * merged] for part, n in zip(parts, sizes, strict=True)])
        np.testing.assert_array_equal(got, whole.numpy())
    for part in strategy.experimental_local_results(together):
        np.testing.assert_array_equal(part.numpy(), alone.numpy())


@pytest.mark.parametrize("rows", [12, 7])
def test_rows_in_another_order_keep_their_numbers(rows: int) -> None:
    x, order = np.ones((rows, 5), np.float32), np.random.default_rng(0).permutation(rows)
    layer = Draws()
    signature = [tf.TensorSpec([None, 5])]
    state = layer.seed.state.numpy()
    *expected, alone = tf.function(layer, input_signature=signature)(x)
    layer.seed.state.assign(state)
    with draw_for_rows(RowOrder(tf.Variable(order))):
        *drawn, together = tf.function(layer.call, input_signature=signature)(x)
    for usual, own in zip(expected, drawn, strict=True):
        by_row = [np.reshape(part.numpy(), (rows, -1)) for part in (usual, own)]
        np.testing.assert_array_equal(by_row[1], by_row[0][order])
    np.testing.assert_array_equal(together, alone)


SHAPES, DTYPES = [(), (3,), (5, 8), (7, 5), (3, 4, 12)], ["float32", "float16", "bfloat16"]
PAIRS = [
    pytest.param(shape, dtype, marks=() if (row - column) % len(DTYPES) == 0 else pytest.mark.slow)
    for row, shape in enumerate(SHAPES)
    for column, dtype in enumerate(DTYPES)
]
"""Each shape with one type, and the others among the slow tests."""


@pytest.mark.parametrize(("shape", "dtype"), PAIRS)
def test_jax_draws_what_tensorflow_draws(shape: tuple[int, ...], dtype: str) -> None:
    jax = pytest.importorskip("jax")
    from distlaunch.strategies.jax import random as jax_random

    draw_uniform = jax.jit(lambda state: jax_random.uniform(state, shape, dtype))
    draw_normal = jax.jit(lambda state: jax_random.normal(state, shape, dtype))
    for state in ([5, 0], [906691060, 7], [2**31 - 1, 3]):
        seed = tf.constant([word % (2**31 - 2) for word in state], tf.int32)
        uniform = np.asarray(draw_uniform(np.array(state, np.uint32)))
        np.testing.assert_array_equal(uniform, tf.random.stateless_uniform(shape, seed, dtype=dtype).numpy())
        normal = np.asarray(draw_normal(np.array(state, np.uint32)))
        expected = tf.random.stateless_normal(shape, seed, dtype=dtype).numpy()
        rounding = float(jax.numpy.finfo(dtype).eps) * 8
        np.testing.assert_allclose(normal.astype(float), expected.astype(float), rtol=rounding, atol=rounding)


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("gpu", False)])
def test_rounds_are_a_loop_on_cpus_and_one_kernel_on_gpus(
    platform: str, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = pytest.importorskip("jax")
    from distlaunch.strategies.jax import random as jax_random

    state, shape = np.array([5, 7], np.uint32), (3, 20)
    expected = np.asarray(jax_random.uniform(state, shape))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    draw = jax.jit(lambda state: jax_random.uniform(state, shape)).lower(state)
    assert ("stablehlo.while" in draw.as_text()) == loops
    np.testing.assert_array_equal(np.asarray(draw.compile()(state)), expected)
