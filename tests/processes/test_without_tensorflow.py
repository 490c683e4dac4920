"""A task on JAX whose data needs no TensorFlow never imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, NumbersChecked
from distlaunch.base.run_dir import RunDir

pytest.importorskip("jax")

MINE = """
import sys
import distlaunch, keras, numpy as np
from distlaunch.data import csv

layers = keras.layers


def model():
    assert distlaunch.task().is_check or "tensorflow" not in sys.modules, "before the model"
    one, two = keras.Input((), name="one"), keras.Input((), name="two")
    x = layers.Concatenate()([layers.Reshape((1,))(one), layers.Reshape((1,))(two)])
    x = layers.Dropout(0.1)(layers.Dense(4, "relu", kernel_initializer="he_normal")(x))
    x = layers.SpectralNormalization(layers.Dense(3))(x)  # assigns a trainable weight
    return keras.Model({"one": one, "two": two}, layers.Dense(1)(x))


class Items:
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"one": index / 7, "two": 0.5}, np.float32(index)


def files():
    return {"train": csv("rows.csv", label="label"), "validation": Items()}


def arrays():
    x = np.linspace(0, 1, 22, dtype="float32")
    return {"train": ({"one": x, "two": 1 - x}, x)}


class Watch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.get_config()
        self.model.predict({"one": np.zeros(2), "two": np.zeros(2)}, verbose=0)
        assert "tensorflow" not in sys.modules, "in training"

    def on_train_end(self, logs=None):
        assert "tensorflow" not in sys.modules, "at the end"
        print("without TensorFlow", flush=True)
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:files", global_batch: 6}
compile: {optimizer: adam, loss: mse}
train:
  epochs: 1
  check: strict
  callbacks: [{name: "mine.py:Watch"}, {name: ModelCheckpoint, args: {filepath: best.keras}}]
strategy: {kind: jax, mesh: {batch: 2}}
"""


@pytest.mark.parametrize("data", ["files", pytest.param("arrays", marks=pytest.mark.slow)])
def test_a_task_without_tensorflow(data: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    rows = [f"{row / 20},{1 - row / 20},{row}" for row in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["one,two,label", *rows, ""]))
    code, out, err = run("train", "mine.yaml", "--set", f"data.function=mine.py:{data}", cwd=tmp_path)
    assert code == 0, out + err
    assert "without TensorFlow" in out
    events = read_events(RunDir(tmp_path / "runs/job").events)
    # Dropout draws the same masks, also if the config compiles the model
    assert {event.status for event in events if isinstance(event, NumbersChecked)} == {"equal"}
    (epoch,) = [event for event in events if isinstance(event, EpochEnded)]
    assert epoch.logs["loss"] > 0
