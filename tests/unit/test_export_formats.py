"""Formats of an export that fail alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.strategies.replica.one_device import OneDevice  # noqa: E402
from distlaunch.strategies.variables import host_value, state_variables  # noqa: E402
from distlaunch.training.build import build_model  # noqa: E402
from distlaunch.training.export.session import ExportError, TrainedModel, export_all  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
X = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)


class Holder(keras.Model):
    """A model without a config that could be saved, since it takes a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any) -> Any:
        return self.layer(x)


def holder() -> Any:
    return Holder(keras.layers.Dense(1, activation=lambda x: x))


def test_a_format_that_cannot_be_written_leaves_the_others(tmp_path: Path) -> None:
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
