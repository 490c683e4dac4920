"""The learning rate that events report is that of the next update."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.checkpoints.optimizer_changes import current_rate

pytestmark = pytest.mark.usefixtures("virtual_devices")
HALVES = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5, staircase=True)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda: keras.optimizers.SGD(0.25), 0.25),
        (lambda: keras.optimizers.SGD(HALVES), 0.1),
        (lambda: keras.optimizers.SGD(HALVES, gradient_accumulation_steps=3), 0.1),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(HALVES)), 0.1),
        (lambda: keras.optimizers.SGD(lambda: 0.5), None),
        (lambda: None, None),
    ],
)
def test_after_three_steps(optimizer: Any, expected: float | None) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    made = optimizer()
    if made is not None:
        model.compile(optimizer=made, loss="mse")
        model.fit(np.zeros((3, 2), "float32"), np.zeros((3, 1), "float32"), batch_size=1, verbose=0)
    assert current_rate(model) == (None if expected is None else pytest.approx(expected))
