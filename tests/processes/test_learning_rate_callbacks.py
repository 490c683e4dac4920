"""A callback that reads and sets the learning rate as a number, as Keras's guides do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_job import MODULE, losses, run_command, write_job

from distlaunch.config.strategies import MODELS
from tests.strategies import sections

HALVES = """

class Halve(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        print(f"rate {float(rate):.4f} of step {int(self.model.optimizer.iterations)}")
        self.model.optimizer.learning_rate = 0.5 * float(rate)
"""


@pytest.fixture(scope="module")
def expected(virtual_devices: None) -> list[float]:
    """The losses of `model.fit`."""
    names: dict[str, Any] = {}
    exec(MODULE + HALVES, names)
    model, halve = names["model"](), names["Halve"]()
    history = model.fit(*names["data"](), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[halve]).history
    return [round(loss, 4) for loss in history["loss"]]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "mirrored" else pytest.mark.slow) for kind in MODELS]
)
def test_the_rate_is_a_number(tmp_path: Path, expected: list[float], kind: str) -> None:
    write_job(tmp_path, MODULE + HALVES, **sections(kind),
              train={"epochs": 2, "callbacks": [{"name": "mine.py:Halve"}]})  # fmt: skip
    done = run_command("train", "job.yaml", cwd=tmp_path)
    assert done.code == 0, done.text
    assert losses(tmp_path) == expected
