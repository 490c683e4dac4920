"""Formats of an export that fail alone, nested outputs, and notes about files that need the user's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.serving import clean_check, exported  # noqa: E402
from distlaunch.serving.exported_model import named_outputs  # noqa: E402
from distlaunch.strategies.replica.one_device import OneDevice  # noqa: E402
from distlaunch.strategies.variables import host_value, state_variables  # noqa: E402
from distlaunch.training.build import build_model  # noqa: E402
from distlaunch.training.export.session import ExportError, TrainedModel, export_all  # noqa: E402
from distlaunch.training.export.writers import on_host, save_keras, save_saved_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
X = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)
NESTED = ["aux/0", "aux/1", "main"]


class Holder(keras.Model):
    """A model without a config that could be saved, since it takes a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any) -> Any:
        return {"main": self.layer(x), "aux": [x, 2 * x]}


def holder() -> Any:
    return Holder(keras.layers.Dense(1, activation=lambda x: x))


def test_a_format_that_cannot_be_written_leaves_the_others(tmp_path: Path) -> None:
    """The SavedModel has the model's nested outputs by name."""
    config = RunConfig.model_validate(
        {"model": {"function": f"{__name__}:holder"}, "data": {"function": "m:f", "global_batch": 2}, "compile": {}}
    )
    rows = (X, np.zeros(2))
    model = build_model(config, OneDevice(), rows)
    state = {name: host_value(variable) for name, variable in state_variables(model).items()}
    trained = TrainedModel(config, state, rows, X, None)
    message = r"^the export as keras could not be written: NotImplementedError: .* Please implement `get_config\(\)`\.$"
    with pytest.raises(ExportError, match=message) as told:
        export_all(trained, tmp_path, ["keras", "weights", "saved_model"], checked=False)
    assert [each.format for each in told.value.written] == ["weights", "saved_model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.weights.h5", "saved_model"]
    check_outputs(exported.open_saved_model(tmp_path / "saved_model"), model, X)


def test_nested_inputs_and_outputs(tmp_path: Path) -> None:
    given = {"x": keras.Input((3,), name="x"), "more": [keras.Input((2,), name="b"), keras.Input((1,), name="a")]}
    model = keras.Model(given, {"main": keras.layers.Dense(1)(given["x"]), "aux": given["more"]})
    x = {"x": X, "more": [X[:, :2], X[:, 2:]]}
    save_saved_model(model, tmp_path / "saved_model", (x, np.zeros(2)), None)
    save_keras(model, tmp_path / "model.keras")
    for opened in exported.open_saved_model(tmp_path / "saved_model"), exported.open_keras(tmp_path / "model.keras"):
        check_outputs(opened, model, x)


def check_outputs(opened: Any, model: Any, x: Any) -> None:
    expected = named_outputs(model(x), on_host)
    assert sorted(expected) == [spec.name for spec in opened.outputs] == NESTED
    assert clean_check.difference(expected, opened.on_structure(x), 1e-6) is None


def own_loss(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y - predicted))


@pytest.mark.parametrize(
    ("loss", "notes"),
    [
        ("mse", []),
        (
            own_loss,
            ["model.keras needs your own 'own_loss' for its loss, metrics or optimizer: pass it in custom_objects, or "
             "load the file with compile=False"],
        ),
    ],
)  # fmt: skip
def test_a_keras_file_that_needs_the_users_loss_has_a_note(tmp_path: Path, loss: Any, notes: list[str]) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    save_keras(model, tmp_path / "model.keras")
    found: list[str] = []
    clean_check._open_keras(tmp_path / "model.keras", {}, found, exported)
    assert found == notes
