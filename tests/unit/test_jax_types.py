"""Batches become arrays of the types that JAX has, without a wrong number."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import keras

from distlaunch.base.errors import ConfigError
from distlaunch.strategies.jax.feed import to_jax_arrays
from distlaunch.training.checks.on_jax import check_state_on_jax

LARGEST, SMALLEST = 2**31 - 1, -(2**31)


def test_numbers_that_fit_become_32_bits_wide() -> None:
    batch = {
        "int": np.array([LARGEST, SMALLEST, 0]),
        "uint": np.array([2**32 - 1], np.uint64),
        "float": np.array([0.5]),
        "none": np.zeros((0, 3), np.int64),
        "small": np.array([-7], np.int8),
    }
    found = to_jax_arrays(batch)
    assert {name: str(value.dtype) for name, value in found.items()} == {
        "int": "int32", "uint": "uint32", "float": "float32", "none": "int32", "small": "int8",
    }  # fmt: skip
    assert all((found[name] == batch[name]).all() for name in batch)


@pytest.mark.parametrize("number", [LARGEST + 1, SMALLEST - 1, 1_700_000_000_000, np.uint64(2**32)])
def test_larger_numbers_are_an_error(number: int) -> None:
    array = np.array([0, number, 1], type(number) if isinstance(number, np.uint64) else np.int64)
    with pytest.raises(ConfigError, match=f"the number {number} in a component of type {array.dtype}, but"):
        to_jax_arrays((array, np.zeros(3)))


class Noisy(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.factor = keras.Variable(0.5, name="factor")


@pytest.mark.usefixtures("virtual_devices")
def test_state_that_jax_would_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def checked(dtype: str, loss: object) -> list[str]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=dtype), keras.layers.Dropout(0.5)])
        model.compile("adam", loss, metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        found.clear()
        check_state_on_jax(model, found.append)
        return found

    assert checked("float32", "mse") == []
    (warning,) = checked("float32", Noisy())
    assert "factor belong to no layer" in warning
    with pytest.raises(ConfigError, match=r"strategy\.kind: got 'jax', but .*dense.*/kernel has the type float64"):
        checked("float64", "mse")
