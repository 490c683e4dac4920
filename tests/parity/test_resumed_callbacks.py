"""A run with callbacks that change what follows equals itself after resumes within epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.run_session import run_session

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_resumed_callbacks"
STEPS = 4  # of an epoch
X = np.random.default_rng(0).normal(size=(30, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5]))[:, None].astype("float32")


def model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])


def data() -> dict[str, Any]:
    return {"train": (X, Y), "validation": (X[:9], Y[:9])}


def slower() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


class FollowsItself(keras.callbacks.Callback):
    """Changes the rate after every step, by what it has counted and seen in private attributes."""

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._seen = 0, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._seen = [*self._seen[-2:], logs["loss"]]
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * (1.0 + 0.01 * self._steps + 0.001 * sum(self._seen)))


def config(*callbacks: str) -> dict[str, Any]:
    return {
        "model": {"function": f"{HERE}:model"},
        "data": {"function": f"{HERE}:data", "global_batch": 8, "shuffle": False},
        "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 0.05, "momentum": 0.9}}, "loss": "mse"},
        "train": {
            "epochs": 4,
            "log_every_steps": 1,
            "steps_per_call": 1,
            "callbacks": [{"name": callback} for callback in callbacks],
        },
        "validation": {},
    }


def losses(run: Path, raw: dict[str, Any], stops: list[int]) -> Iterator[float]:
    for stop in stops:
        yield from (logs["loss"] for logs in run_session(str(run), raw, stop, leave=False))


@pytest.mark.parametrize(
    "callbacks",
    [
        ("slower", "FollowsItself"),
        pytest.param(("slower",), marks=pytest.mark.slow),
        pytest.param(("FollowsItself",), marks=pytest.mark.slow),
    ],
)
def test_resumes_within_epochs_change_nothing(tmp_path: Path, callbacks: tuple[str, ...]) -> None:
    raw = config(*(f"{HERE}:{callback}" for callback in callbacks))
    whole = list(losses(tmp_path / "whole", raw, [4 * STEPS + 1]))
    assert len(whole) == 4 * STEPS
    # within an epoch, once more within it, after its last step but before its validation, and at its end
    assert list(losses(tmp_path / "parts", raw, [1, 2, STEPS - 3, 2 * STEPS - 1, 4 * STEPS])) == whole
