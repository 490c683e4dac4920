"""A model and data in each form, with what only training may see: random layers, augmentation, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(61, 4)).astype("float32")
Y = np.random.default_rng(1).integers(3, size=61)


class Items:
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Batches(keras.utils.PyDataset):
    """Gets noisier from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = 0.0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * 12, index * 12 + 12)
        noise = self.noise and self.noise * np.random.normal(size=X[rows].shape)
        return (X[rows] + noise).astype("float32"), Y[rows]

    def on_epoch_end(self) -> None:
        self.noise += 1.0


TIERS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, Y),
    "items": Items,
    "pipeline": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "unknown": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True),
    "batches": Batches,
}


def data(tier: str) -> dict[str, Any]:
    validation = TIERS[tier]()
    return {"train": TIERS[tier](), "validation": validation}


def halved(x: Any, y: Any) -> Any:
    return x / 2, y


def noisy(x: Any, y: Any, seed: Any) -> Any:
    return x + tf.random.stateless_normal([4], seed), (y + 1) % 3


def model(rate: float = 0.0, normalises: bool = True) -> keras.Model:
    layers = keras.layers
    norm = [layers.BatchNormalization()] if normalises else []
    random = [layers.GaussianNoise(rate), layers.Dropout(rate), layers.AlphaDropout(rate)] if rate else []
    return keras.Sequential([layers.Input((4,)), *random[:1], layers.Dense(8, "tanh", name="first"), *norm, *random[1:],
                             layers.Dense(3, name="last")])  # fmt: skip
