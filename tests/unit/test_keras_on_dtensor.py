"""Operations that Keras's metrics use have the same results on a DTensor mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras import ops

from distlaunch.patches import keras_on_dtensor
from distlaunch.strategies.variables import logs_to_host

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")
INDICES = np.array([[0, 1], [1, 1], [0, 0], [1, 1]])
NUMBERS = np.arange(8, dtype="float32").reshape(4, 2)


def on_mesh(function: Callable[[Any], Any], value: np.ndarray, first: str) -> np.ndarray:
    """Return the result of a function on two devices, whose first axis is laid out as `first`."""
    dtensor: Any = tf.experimental.dtensor
    mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
    layout = dtensor.Layout([first, *["unsharded"] * (value.ndim - 1)], mesh)
    placed = dtensor.relayout(dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.ndim)), layout)
    result = tf.function(function, autograph=False)(placed)
    return dtensor.relayout(result, dtensor.Layout.replicated(mesh, result.shape.rank)).numpy()


@pytest.mark.parametrize("first", ["batch", "unsharded"])
def test_scattering_and_flipping(first: str) -> None:
    keras_on_dtensor.install()
    counted = on_mesh(lambda at: ops.scatter(at, ops.ones((4,)), (2, 2)), INDICES, first)
    np.testing.assert_array_equal(counted, [[1, 1], [0, 2]])
    for axis in (None, 0, 1, -1):
        flipped = on_mesh(lambda x, axis=axis: ops.flip(x, axis), NUMBERS, first)
        np.testing.assert_array_equal(flipped, np.flip(NUMBERS, axis))


def test_results_of_one_element_are_numbers() -> None:
    """F1Score of one output has the shape [1]."""
    assert logs_to_host({"f1": np.ones([1]), "each": np.ones([2]), "loss": np.float32(2)})["f1"] == 1.0
