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
    """Examples by number, of which some cannot be read."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        if index in self.broken:
            raise ValueError("a broken example")
        return X[index], Y[index]


FORMS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, Y),
    "shifted": lambda: (X + 1, Y),
    "items": Items,
    "broken": lambda: Items(3),
    "more broken": lambda: Items(3, 5),
    "pipeline": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "batches": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4),
}


def data(form: str = "arrays") -> dict[str, Any]:
    return {"train": FORMS[form](), "validation": (X, Y)}


def other_data() -> dict[str, Any]:
    return data("shifted")


def parts(context: Any = None) -> dict[str, Any]:
    """Examples whole, or those of a stream, or of a worker."""
    whole = FORMS["pipeline"]()
    if hasattr(context, "num_streams"):
        whole = whole.shard(context.num_streams, context.stream)
    elif context is not None:
        whole = whole.skip(3)
    return {"train": whole, "validation": whole}


def model(units: int = 2, compiled: bool = False) -> keras.Model:
    layers = keras.layers
    made = keras.Sequential([layers.Input((3,)), layers.Dropout(0.1), layers.Dense(units, name="out")])
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return made


def other_model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, use_bias=False, name="out")])


def scaled(x: Any, y: Any) -> Any:
    return x * 2, y


def scaling(inputs: Any, by: float = 1.0) -> keras.layers.Layer:
    return keras.layers.Rescaling(by)


def shifting(inputs: Any, by: float = 1.0) -> keras.layers.Layer:
    return keras.layers.Rescaling(1.0, offset=by)


def own_loss(y: Any, outputs: Any) -> Any:
    return 2.0 * keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def other_loss(y: Any, outputs: Any) -> Any:
    return 3.0 * keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def logger(path: str) -> keras.callbacks.Callback:
    return keras.callbacks.CSVLogger(path)


def other_logger(path: str) -> keras.callbacks.Callback:
    return keras.callbacks.CSVLogger(f"{path}.other")


def step(context: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    with tf.GradientTape() as tape:
        loss = 3.0 * context.average(context.per_example_loss(y, context.model(x, training=True)))
    context.apply(tape, loss)
    return {"loss": loss}
