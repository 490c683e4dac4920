"""The reference step of `loop: custom` computes the compiled loss as `fit` does, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.errors import ConfigError
from tests.parity.attempts import losses_and_notices

pytestmark = pytest.mark.usefixtures("virtual_devices")
TOKENS = np.random.default_rng(0).integers(0, 5, (24, 6))
LABELS = np.random.default_rng(1).normal(size=(24, 6, 1)).astype("float32")
MESH = {"kind": "dtensor", "mesh": {"batch": 2}}


def model(masks: bool = False) -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 3, mask_zero=masks)(tokens)
    return keras.Model(tokens, keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1), name="out")(x))


def data() -> dict[str, Any]:
    return {"train": (TOKENS, LABELS)}


def losses(folder: Path, loop: str, *, masks: bool = False, strategy: Any = None, **compiled: Any) -> list[float]:
    raw = {
        "model": {"function": f"{__name__}:model", "args": {"masks": masks}},
        "data": {"function": f"{__name__}:data", "global_batch": 8, "shuffle": False},
        "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 0.1}}, "loss": "mse", **compiled},
        "train": {"loop": loop, "epochs": 2},
        "strategy": strategy or {"kind": "one_device"},
    }
    return losses_and_notices(folder / f"{loop}-{strategy}", [raw])[0]


@pytest.mark.parametrize("loss_weights", [[0.25], {"out": 3.0}])
def test_the_weight_of_the_loss_counts(tmp_path: Path, loss_weights: Any) -> None:
    expected = losses(tmp_path, "fit", loss_weights=loss_weights)
    np.testing.assert_allclose(losses(tmp_path, "custom", loss_weights=loss_weights), expected, rtol=1e-6)
    if isinstance(loss_weights, list):
        on_mesh = losses(tmp_path, "custom", loss_weights=loss_weights, strategy=MESH)
        np.testing.assert_allclose(on_mesh, expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", [None, MESH], ids=["one_device", "dtensor"])
def test_what_the_reference_step_does_not_compute_is_an_error(tmp_path: Path, strategy: Any) -> None:
    summed = {"name": "MeanSquaredError", "args": {"reduction": "sum"}}
    with pytest.raises(ConfigError, match="means over the batch, but the loss has the reduction 'sum'"):
        losses(tmp_path, "custom", strategy=strategy, loss=summed)
    with pytest.raises(ConfigError, match="the model masks positions of its output"):
        losses(tmp_path, "custom", strategy=strategy, masks=True)
    # a loss that is a function has no reduction
    assert losses(tmp_path, "custom", strategy=strategy, loss="mean_squared_error")
