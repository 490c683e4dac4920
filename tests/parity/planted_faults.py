"""Models with a planted fault, by which the run trains differently from the process that compares it with one device.

The fault is planted in the run, or for tests that share a run, in that process.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import distlaunch

ROWS, VALID, BATCH = 53, 20, 16
"""The last batch has 5 rows."""
FAULTS = {
    "gradients": "the size of the gradients (2 times",
    "stale": "update",
    "rows": "loss",
    "mask": "loss",
    "metric": "hits",
    "optimizer": "the optimizer (RMSprop instead of Adam)",
    "rate": "learning rate (0.005 instead of 0.01)",
    "momentum": "moving_mean",
}
"""For each fault, words that name what differs."""


class Hits(keras.metrics.Metric):
    """Number of correct predictions."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        hits = ops.cast(ops.argmax(prediction, -1) == ops.cast(y, "int32"), "float32")
        self.total.assign_add(self.factor * ops.sum(hits))

    def result(self) -> Any:
        return self.total + 0.0


def data(kind: str = "mlp") -> dict[str, Any]:
    rng = np.random.default_rng(3)
    number = ROWS + VALID
    if kind == "transformer":
        x = rng.integers(0, 20, size=(number, 8)).astype("int32")
        y = (x.sum(1) % 3).astype("int32")
    else:
        x = rng.normal(size=(number, 8, 8, 1) if kind == "cnn" else (number, 8)).astype("float32")
        y = np.digitize(x.reshape(number, -1)[:, :3].sum(1), [-1, 1]).astype("int32")
    return {"train": (x[:ROWS], y[:ROWS]), "validation": (x[ROWS:], y[ROWS:])}


def shifted(x: Any, y: Any) -> Any:
    """Augment an example."""
    return x + 1, y


def infinite(y_true: Any, y_pred: Any) -> Any:
    """Return infinity, as the signal-to-noise ratio of equal images does."""
    del y_true
    return ops.full_like(y_pred[:, 0], float("inf"))


def model(kind: str = "mlp", fault: str = "", in_run: bool = True, synchronized: bool = True) -> keras.Model:
    if distlaunch.task().is_check:
        print(Path("/proc/self/cmdline").read_bytes())
    fault = "" if distlaunch.task().is_check is in_run else fault
    made = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}[kind](
        0.5 if fault == "momentum" else 0.9, synchronized
    )
    rate = 0.005 if fault == "rate" else 0.01
    optimizer = keras.optimizers.RMSprop(rate) if fault == "optimizer" else keras.optimizers.Adam(rate)
    made.compile(
        optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Hits(2.0 if fault == "metric" else 1.0, name="hits"), infinite],
    )  # fmt: skip
    _plant(made, fault)
    return made


def _mlp(momentum: float, synchronized: bool) -> keras.Model:
    norm = layers.BatchNormalization(momentum=momentum, synchronized=synchronized)
    return keras.Sequential([layers.Input((8,)), layers.Dense(16, "tanh"), norm, layers.Dropout(0.1), layers.Dense(3)])


def _cnn(momentum: float, synchronized: bool) -> keras.Model:
    norm = layers.BatchNormalization(momentum=momentum, synchronized=synchronized)
    first = [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), norm]
    return keras.Sequential([*first, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3)])


def _transformer(momentum: float, synchronized: bool) -> keras.Model:
    tokens = layers.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    x = layers.BatchNormalization(momentum=momentum, synchronized=synchronized)(layers.Dense(8, "gelu")(x))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def _doubled(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * 2, gradient.indices, gradient.dense_shape)
    return gradient * 2


def _plant(made: keras.Model, fault: str) -> None:
    optimizer: Any = made.optimizer
    apply, compute_loss = optimizer.apply, made.compute_loss

    def changed_gradients(self: Any, grads: Any, variables: Any = None) -> Any:
        grads = list(grads)
        if fault == "gradients":
            return apply([_doubled(gradient) for gradient in grads], variables)
        return apply([*grads[:-1], ops.zeros_like(grads[-1])], variables)

    def changed_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **options: Any
    ) -> Any:
        if fault == "rows":
            return compute_loss(x, y[:-1], y_pred[:-1], sample_weight, **options)
        return compute_loss(x, y, y_pred, ops.cast(y != 0, "float32"), **options)

    if fault in ("gradients", "stale"):
        object.__setattr__(optimizer, "apply", types.MethodType(changed_gradients, optimizer))
    if fault in ("rows", "mask"):
        object.__setattr__(made, "compute_loss", changed_loss)
