"""A model, data in several forms, a step and callbacks for runs that change one setting at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(14, 3)).astype("float32")
Y = np.random.default_rng(1).integers(2, size=14)


class Items:
    """Examples by number, of which one cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise ValueError("a broken example")
        return X[index], Y[index]


FORMS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, Y),
    "items": Items,
    "broken": lambda: Items(broken=3),
    "two broken": lambda: Items(broken=3),
    "pipeline": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "batches": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4),
}


def data(form: str = "arrays", context: Any = None) -> dict[str, Any]:
    return {"train": FORMS[form](), "validation": (X, Y)}


def other_data() -> dict[str, Any]:
    return {"train": (X + 1, Y), "validation": (X + 1, Y)}


def model(units: int = 2) -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dropout(0.1), keras.layers.Dense(units)])


def other_model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, use_bias=False)])


def scaled(x: Any, y: Any) -> Any:
    return x * 2, y


def scaling(inputs: Any, by: float = 1.0) -> keras.layers.Layer:
    return keras.layers.Rescaling(by)


def step(context: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    with tf.GradientTape() as tape:
        loss = 3.0 * context.average(context.per_example_loss(y, context.model(x, training=True)))
    context.apply(tape, loss)
    return {"loss": loss}
