"""Batches become arrays of the types that JAX has, without a wrong number."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from distlaunch.base.errors import ConfigError
from distlaunch.strategies.jax.feed import to_jax_arrays

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
