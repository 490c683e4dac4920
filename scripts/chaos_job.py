"""What the runs of chaos.py train: a small model, slowly, and a callback that fails when it is told to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

STEP_S = 0.01
"""Each step takes so long at least, so that there are moments to disturb."""


class ChaosError(RuntimeError):
    """The exception that is told apart from all others."""


def model() -> keras.Model:
    """Big enough that its checkpoints can be told from other files by their size."""
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
    """Ends this task as the file FOLDER/TASK says, once."""

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
