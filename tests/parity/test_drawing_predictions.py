"""Layers that draw and count in predictions go on from batch to batch, as in Keras, and begin anew with each pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.config.strategies import MODELS
from tests.parity.optimizer_runs import Run, chosen
from tests.parity.probe_models import dense
from tests.strategies import IN_ONE_PROCESS
from tests.warm import run_module

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_drawing_predictions"
ROW = np.linspace(-1, 1, 8, dtype="float32")


@keras.saving.register_keras_serializable("drawing")
class AlwaysDropout(keras.layers.Dropout):
    def call(self, inputs: Any, training: Any = None) -> Any:
        return super().call(inputs, training=True)


@keras.saving.register_keras_serializable("drawing")
class Numbered(keras.layers.Layer):
    """Multiplies by the number of its calls."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1.0)
        return inputs * self.calls


def model() -> keras.Model:
    layers = [keras.Input((8,)), dense(16, 1), AlwaysDropout(0.5, seed=3), dense(2, 2), Numbered()]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made


def data() -> dict[str, Any]:
    x = np.tile(ROW, (60, 1))
    return {"train": (x, x[:, :2]), "validation": (x, x[:, :2])}


def predicted(kind: str, folder: Path) -> Any:
    run = Run(kind, folder / "run", "")
    run.raw["model"] = {"function": f"{HERE}:model"}
    run.raw["data"] = {"function": f"{HERE}:data", "global_batch": 24, "shuffle": False}
    session = run.train(1)
    source = session.validation.evaluation_source()
    return [np.asarray(session.program.predict(source, lambda: False)).tolist() for _ in range(2)]


@pytest.mark.parametrize(
    "kind", chosen("jax", among=[kind for kind in IN_ONE_PROCESS if not MODELS[kind].has_coordinator])
)
def test_predictions_of_a_pass(kind: str) -> None:
    out = run_module("tests.parity.optimizer_runs", [kind, f"{HERE}.predicted"], backend=MODELS[kind].backend,
                     deadline_s=200)  # fmt: skip
    first, again = json.loads(out.splitlines()[-1])[f"{HERE}.predicted"]
    theirs = model()
    splits = data()
    theirs.fit(*splits["train"], batch_size=24, epochs=1, shuffle=False, verbose=0,
               validation_data=splits["validation"], validation_batch_size=24)  # fmt: skip
    expected = theirs.predict(splits["validation"][0], batch_size=24, verbose=0)
    assert np.abs(expected[0] - expected[24]).max() > 0.1
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5)
    if kind in ("jax", "dtensor"):
        # nothing of a pass is left in the model
        assert again == first
