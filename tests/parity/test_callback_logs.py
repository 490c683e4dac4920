"""Tests that callbacks give the same logs and use the model as in `fit`, on a mesh and under `mirrored`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch import notebook
from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import EpochEnded
from tests.parity.optimizer_runs import STRATEGIES
from tests.parity.probe_models import dense
from tests.warm import run_module

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_callback_logs"
SEEN: list[Any] = []


class Asks(keras.callbacks.Callback):
    """Predicts, evaluates and counts, as callbacks for fit do, and halves the learning rate."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = data()["validation"]
        self.model.optimizer.learning_rate = 0.5 * float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        predicted = self.model.predict(x, verbose=0, batch_size=7)
        evaluated = self.model.evaluate(x, y, verbose=0, return_dict=True)
        steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        SEEN.append([float(np.sum(predicted)), evaluated["loss"], (logs or {})["val_loss"], steps])


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((6,)), dense(4, 1, activation="tanh"), dense(1, 2)])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


def data() -> dict[str, Any]:
    x = np.random.default_rng(4).normal(size=(38, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    return {"train": (x, y), "validation": (x[:17], y[:17])}


CALLBACKS = [
    {"name": f"{HERE}:Asks"},
    {"name": "ReduceLROnPlateau", "args": {"monitor": "loss", "patience": 1, "min_delta": 9.0}},
]


def logs(kind: str, folder: Path) -> Any:
    """Return the logs of each epoch as the events have them, and what the callback saw."""
    SEEN.clear()
    config = {
        "name": "logs",
        "model": {"function": f"{HERE}:model"},
        "data": {"function": f"{HERE}:data", "global_batch": 8, "shuffle": False},
        "train": {"epochs": 3, "callbacks": CALLBACKS},
        **STRATEGIES[kind],
    }
    result = notebook.train(config, runs_dir=folder)
    events = read_events_of(result.run_dir / "events.jsonl", EpochEnded)
    from tests.parity import test_callback_logs

    return [event.logs for event in events], test_callback_logs.SEEN


@pytest.mark.parametrize("kind", ["dtensor", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_what_callbacks_of_fit_do(kind: str) -> None:
    out = run_module("tests.parity.optimizer_runs", [kind, f"{HERE}.logs"], deadline_s=200)
    found, seen = json.loads(out.splitlines()[-1])[f"{HERE}.logs"]
    SEEN.clear()
    splits, made = data(), model()
    plateau = keras.callbacks.ReduceLROnPlateau(**CALLBACKS[1]["args"])
    history = made.fit(*splits["train"], batch_size=8, epochs=3, shuffle=False, verbose=0, validation_batch_size=8,
                       validation_data=splits["validation"], callbacks=[Asks(), plateau]).history  # fmt: skip
    assert history["learning_rate"][2] < history["learning_rate"][0]
    for name, values in history.items():
        assert [epoch[name] for epoch in found] == pytest.approx(values, rel=1e-5), name
    for ours, theirs in zip(seen, SEEN, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
