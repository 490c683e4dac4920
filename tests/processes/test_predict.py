"""`distlaunch predict` with real workers: a model of one's own, two replicas, and what goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from real import run

MINE = """
import keras, numpy as np

def model():
    x = keras.Input((3,))
    return keras.Model(x, {"double": keras.layers.Rescaling(2.0)(x), "sum": keras.layers.Dense(1)(x)})

def data():
    x = np.arange(300.0, dtype="float32").reshape(100, 3)
    return x, {"double": x * 2, "sum": x.sum(1, keepdims=True)}
"""
CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32, remainder: drop}
compile: {optimizer: sgd, loss: {double: mse, sum: mae}}
strategy: {kind: mirrored, replicas: 2}
"""


def test_predictions_in_order_and_plain_errors(tmp_path: Path) -> None:
    """All 100 examples, although training shuffles them and drops the last four."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    code, _, err = run("train", "mine.yaml", "-q", cwd=tmp_path)
    assert code == 0, err
    code, out, err = run("predict", "runs/mine", "--split", "train", cwd=tmp_path)
    assert code == 0, err
    assert "predicted train at step 3 to runs/mine/predictions/train-00000003.npz: double 100 x 3, sum 100 x 1" in out
    with np.load(tmp_path / "runs/mine/predictions/train-00000003.npz") as found:
        np.testing.assert_array_equal(found["double"], np.arange(300.0).reshape(100, 3) * 2)
    shutil.rmtree(tmp_path / "runs/mine/predictions")
    (tmp_path / "runs/mine/predictions").write_text("a file is in the way")
    for words, expected_code, message in (
        (("--split", "train"), 3, "the predictions cannot be written: File exists"),
        (("--checkpoint", "7"), 2, "has no checkpoint of step 7; available: 3"),
    ):
        code, out, err = run("predict", "runs/mine", *words, cwd=tmp_path)
        assert code == expected_code, err
        assert message in " ".join(err.split()), err
        assert "Traceback" not in out + err
