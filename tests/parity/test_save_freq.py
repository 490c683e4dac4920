"""`ModelCheckpoint(save_freq=N)` saves after the same steps as under `fit`, however many steps a graph call has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.optimizer_models import BATCH, compiled, data
from tests.parity.optimizer_runs import Run

pytestmark = [
    pytest.mark.usefixtures("virtual_devices"),
    # the weights alone are read here
    pytest.mark.filterwarnings("ignore:Skipping variable loading"),
]
NAME = "{epoch:02d}-{batch:02d}.weights.h5"


def _weights(folder: Path) -> dict[str, list[np.ndarray]]:
    found = {}
    for path in sorted(folder.glob("*.h5")):
        model = compiled(momentum=0.9)
        model.load_weights(path)
        found[path.name] = [weight.numpy() for weight in model.weights]
    return found


@pytest.mark.parametrize(
    ("strategy", "steps_per_call", "every", "stop_after"),
    [
        pytest.param("one_device", 64, 3, None, marks=pytest.mark.slow),
        ("mirrored", 64, 5, None),
        ("one_device", "auto", 5, 7),
        pytest.param("one_device", 4, 4, 6, marks=pytest.mark.slow),
    ],
)
def test_files_are_those_of_fit(
    tmp_path: Path, strategy: str, steps_per_call: Any, every: int, stop_after: Any
) -> None:
    args: dict[str, Any] = {"filepath": f"saved/{NAME}", "save_freq": every, "save_weights_only": True}
    run = Run(strategy, tmp_path / "run", "compiled", momentum=0.9)
    train = {"callbacks": [{"name": "ModelCheckpoint", "args": args}], "steps_per_call": steps_per_call}
    if stop_after is not None:
        run.train(4, stop_after=stop_after, train=train)
    run.train(4, train=train)
    ours = _weights(tmp_path / "run/saved")
    (tmp_path / "fit").mkdir()
    (x, y), model = data()["train"], compiled(momentum=0.9)
    callback = keras.callbacks.ModelCheckpoint(str(tmp_path / "fit" / NAME), save_freq=every, save_weights_only=True)
    model.fit(x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, callbacks=[callback])
    theirs = _weights(tmp_path / "fit")
    assert list(ours) == list(theirs)
    for name, weights in theirs.items():
        for one, other in zip(ours[name], weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
