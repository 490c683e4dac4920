"""Validation in training evaluates the model of the checkpoint, even if each replica has its own statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import json_lines, run

MINE = """
import keras, numpy as np
L = keras.layers

def model():
    return keras.Sequential([keras.Input((4,)), L.Dense(8, "relu"), L.BatchNormalization(momentum=0.5), L.Dense(1)])

def data():
    x = np.random.default_rng(0).gamma(1.0, size=(203, 4)).astype("float32")
    y = (x.sum(1, keepdims=True) * np.linspace(0, 3, 203)[:, None]).astype("float32")
    return {"train": (x[:150], y[:150]), "validation": (x[150:], y[150:])}
"""
CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 3}
"""
STRATEGIES = {
    "mirrored": "strategy: {kind: mirrored, replicas: 2}",
    "workers": "strategy: {kind: multi_worker_mirrored}\ncluster: {workers: 2}",
}


def _validations(folder: Path, *words: str) -> list[float]:
    code, out, err = run("train", *words, "--json", cwd=folder)
    assert code == 0, err
    return [line["logs"]["val_loss"] for line in json_lines(out) if line["event"] == "EpochEnded"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "workers"])
def test_validation_is_of_the_checkpoint_and_the_same_after_a_resume(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG + STRATEGIES[strategy])
    whole = _validations(tmp_path, "mine.yaml", "--name", "whole")
    assert len(set(whole)) == 3
    code, out, err = run("evaluate", "runs/whole", "--json", cwd=tmp_path)
    assert code == 0, err
    (found,) = [line["logs"] for line in json_lines(out) if line["event"] == "Evaluated"]
    assert found["loss"] == pytest.approx(whole[-1], rel=1e-6)
    first = _validations(tmp_path, "mine.yaml", "--name", "parts", "--set", "train.epochs=1")
    rest = _validations(tmp_path, "runs/parts", "--resume", "--set", "train.epochs=3")
    assert [*first, *rest] == pytest.approx(whole, rel=1e-6)
