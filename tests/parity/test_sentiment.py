"""The sentiment classifier of the DTensor tutorial on three meshes: a tf.Module with its own layers and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.once import once
from tests.parity.compare import TOLERANCE, deviations
from tests.parity.run_session import run_session

pytest.importorskip("tensorflow")
CONFIGS = Path(__file__).parents[2] / "configs"
MESHES = ("sentiment", "sentiment_model_parallel", "sentiment_spatial_parallel")
STEPS = 50


def read(name: str) -> dict[str, Any]:
    """The config for some steps, the last of them with 40 of 64 reviews."""
    raw = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    raw.update(resume="never", export=[], validation={"every_epochs": 1, "steps": 4})
    raw["data"]["train_examples"] = 64 * (STEPS - 1) + 40
    raw["train"].update(epochs=1, log_every_steps=1, steps_per_call=1)
    return raw


@pytest.mark.slow  # in CI test_sentiment.py of tests/processes trains with all three
@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize("name", MESHES)
def test_mesh(name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    config = {**read(MESHES[0]), "strategy": {"kind": "one_device"}}
    # the same for all meshes
    alone = once(tmp_path_factory, "sentiment", lambda folder: run_session(str(folder), config, STEPS * 2))
    trained = run_session(str(tmp_path), read(name), STEPS * 2)
    assert len(trained) == len(alone) == STEPS
    deviation = deviations({"steps": trained}, {"steps": alone})
    assert float(np.max(deviation)) <= TOLERANCE
