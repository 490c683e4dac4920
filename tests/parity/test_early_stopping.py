"""A run that ended with the weights of its best epoch and resumes with more epochs equals a second call of `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.attempts import losses_and_notices

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_early_stopping"
X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5]) + np.random.default_rng(1).normal(size=48)).astype("float32")[:, None]
# the loss falls, so that the best epoch by this is the first one
STOPPING = {"monitor": "val_loss", "mode": "max", "restore_best_weights": True}


def model() -> keras.Model:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), loss="mse")
    return made


def data() -> dict[str, Any]:
    return {"train": (X, Y), "validation": (X[:20], Y[:20])}


def trained(
    folder: Path, epochs: tuple[int, ...], strategy: dict[str, Any], patience: int
) -> tuple[list[float], list[str]]:
    """Return the loss of each epoch, in one attempt after the other, and what the run said."""
    configs = [
        {
            "model": {"function": f"{HERE}:model"},
            "data": {"function": f"{HERE}:data", "global_batch": 8, "shuffle": False},
            "train": {
                "epochs": number,
                "callbacks": [{"name": "EarlyStopping", "args": {**STOPPING, "patience": patience}}],
            },
            "strategy": strategy,
        }
        for number in epochs
    ]
    return losses_and_notices(folder, configs)


def fitted(calls: tuple[tuple[int, int], ...], patience: int) -> list[float]:
    """Return the loss of each epoch of `fit`, called again and again with the same model and callback."""
    made, stopping = model(), keras.callbacks.EarlyStopping(**STOPPING, patience=patience)
    losses: list[float] = []
    for first, last in calls:
        history = made.fit(X, Y, batch_size=8, initial_epoch=first, epochs=last, shuffle=False, verbose=0,
                           validation_data=(X[:20], Y[:20]), callbacks=[stopping])  # fmt: skip
        losses += history.history["loss"]
    return losses


STRATEGIES = [{"kind": "one_device"}, {"kind": "mirrored", "replicas": 3}]


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.slow)],
    ids=lambda strategy: strategy["kind"],
)
def test_after_its_last_epoch(tmp_path: Path, strategy: dict[str, Any]) -> None:
    losses, said = trained(tmp_path, (3, 6), strategy, patience=20)
    np.testing.assert_allclose(losses, fitted(((0, 3), (3, 6)), patience=20), rtol=1e-5)
    assert losses[3] > losses[2]  # from the weights of the first epoch
    assert any("EarlyStopping has restored the weights of epoch 1" in each for each in said)


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.slow)],
    ids=lambda strategy: strategy["kind"],
)
def test_after_an_early_end(tmp_path: Path, strategy: dict[str, Any]) -> None:
    losses, said = trained(tmp_path, (9, 20), strategy, patience=2)
    assert len(losses) == 6
    np.testing.assert_allclose(losses, fitted(((0, 9), (3, 20)), patience=2), rtol=1e-5)
    assert any(
        "a callback ended training early, after epoch 3; training continues like a second call of `fit`" in each
        for each in said
    )
    assert any(
        "EarlyStopping ended training after epoch 6 of 20; the weights are those of epoch 4" in each for each in said
    )


def test_without_more_epochs_an_early_end_stays(tmp_path: Path) -> None:
    losses, said = trained(tmp_path, (9, 9), STRATEGIES[0], patience=2)
    assert len(losses) == 3
    assert said[-1].endswith("the weights are those of epoch 1; increase `train.epochs` to continue")
