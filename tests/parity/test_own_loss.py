"""A model without compiled loss, whose own `train_step` computes the loss, trains as in Keras's `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch import notebook
from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, Notice
from tests.strategies import IN_ONE_PROCESS, IN_THIS_PROCESS

HERE = "tests.parity.test_own_loss"
layers = keras.layers


class Autoencoder(keras.Model):
    """With a loss of its own, as Keras's examples of VAE, GAN and distillation have."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.image = layers.Dense(4, "relu"), layers.Dense(12)
        self.tracker = keras.metrics.Mean(name="reconstruction_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any, training: bool = False) -> Any:
        return self.image(self.code(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - x)) + 0.0 * tf.reduce_mean(y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"reconstruction_loss": self.tracker.result()}


def autoencoder() -> keras.Model:
    model = Autoencoder()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


def data() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(96, 12)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    return {"train": (x, y), "validation": (x, y)}


@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize(
    "strategy",
    [IN_ONE_PROCESS[kind]["strategy"] for kind in IN_THIS_PROCESS],
    ids=IN_THIS_PROCESS,
)
def test_it_trains(strategy: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "name": "own",
        "model": {"function": f"{HERE}:autoencoder"},
        "data": {"function": f"{HERE}:data", "global_batch": 24},
        "train": {"epochs": 8},
        "strategy": strategy,
    }
    notebook.train(config, runs_dir=tmp_path)
    events = read_events(tmp_path / "own" / "events.jsonl")
    losses = [event.logs["reconstruction_loss"] for event in events if isinstance(event, EpochEnded)]
    assert losses[-1] < 0.9 * losses[0]
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told == ["the model is not validated, because it has neither a loss nor a test_step of its own"]
