"""The model and data of the runs of chaos.py: a small model with slow steps, and a callback that fails on request."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

STEP_S = 0.01
"""Minimum duration of a step, so that there is time to disturb the run."""


class ChaosError(RuntimeError):
    """The exception that the callback raises, which differs from all others."""


def model() -> keras.Model:
    """Return a model so large that its checkpoints can be distinguished from other files by their size."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(256, "tanh"),
            layers.Dropout(0.2),
            layers.Dense(256, "tanh"),
            layers.Dense(1),
        ]
    )


def data() -> dict[str, Any]:
    rows = np.random.default_rng(0).normal(size=(640, 16)).astype("float32")
    return {"train": (rows, rows[:, :1]), "validation": (rows[:64], rows[:64, :1])}


class Sabotage(keras.callbacks.Callback):
    """Fails or ends this task once, as the file FOLDER/TASK requests."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        given = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {"type": "worker", "index": 0})
        self._order = Path(folder) / f"{given['type']}-{given['index']}"

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        time.sleep(STEP_S)
        if not self._order.exists():
            return
        how = self._order.read_text()
        self._order.unlink()
        if how == "exit1":
            os._exit(1)
        raise ChaosError("told to fail")
