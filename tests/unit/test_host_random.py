"""TensorFlow's random numbers in NumPy: those of the initial weights, and the orders of examples."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from distlaunch.data.on_host.random import Generator, shuffled  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
SEEDS = ((7, 123), (2_147_483_645, 0))
TYPES = ("float32", "float16", "bfloat16", "float64")


@pytest.mark.parametrize("number", [1003, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_those_of_tensorflow(dtype: str, number: int) -> None:
    for seed in SEEDS:
        for name, most in (("uniform", 0), ("normal", 1), ("truncated_normal", 1)):
            draw = getattr(tf.random, f"stateless_{name}")
            expected = draw((number,), np.array(seed, np.int32), dtype=dtype).numpy()
            given = getattr(Generator(seed), name)((number,), dtype)
            assert given.dtype == expected.dtype
            assert _roundings(given, expected) <= most, (seed, name)


def test_the_shape_changes_no_number() -> None:
    flat = Generator((1, 2)).normal((30,))
    np.testing.assert_array_equal(Generator((1, 2)).normal((2, 3, 5)), flat.reshape(2, 3, 5))
    assert Generator((1, 2)).uniform(()).shape == ()


@pytest.mark.parametrize("number", [0, 1, 2, 5, 1000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_orders_are_those_of_tensorflow(number: int) -> None:
    for seed in ((0, 0), (42, 3), (2**40 + 3, 2**33)):
        numbers = tf.range(number, dtype=tf.int64)
        expected = tf.random.experimental.stateless_shuffle(numbers, seed=np.array(seed, np.int64)).numpy()
        np.testing.assert_array_equal(shuffled(np.arange(number), seed), expected)


def _roundings(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many floating-point numbers lie between two arrays' entries at most."""
    kind = {2: np.int16, 4: np.int32, 8: np.int64}[one.dtype.itemsize]
    places = [each.view(kind).astype(np.int64) for each in (one, other)]
    # negative numbers have the sign as the highest bit
    first, second = (np.where(place < 0, np.iinfo(kind).min - place, place) for place in places)
    return int(np.abs(first - second).max())
