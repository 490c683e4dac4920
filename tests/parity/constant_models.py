"""Models that hold tensors outside their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parity.optimizer_runs import STRATEGIES
from tests.parity.probe_models import dense

HERE = "tests.parity.constant_models"
RANDOM = np.random.default_rng(2)
X = RANDOM.normal(3.0, 2.0, size=(44, 24)).astype("float32")
KINDS = ("table", "statistics", "loss", "large table")


class Table(keras.layers.Layer):
    """Adds rows of a table that is no weight, as encodings of positions are."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(**options)
        self.table = tf.constant(np.sin(np.arange(24.0 * rows)).reshape(rows, 24), tf.float32)

    def call(self, x: Any) -> Any:
        return x + self.table[:1] + tf.reduce_mean(self.table, 0)


class Counter(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(1.0, trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.calls


def weighted() -> Any:
    """A loss with a tensor; made by a call, since importing a module of tests must not begin TensorFlow."""
    weights = tf.constant(np.linspace(0.5, 1.5, 200), tf.float32)

    def loss(y: Any, predicted: Any) -> Any:
        return tf.reduce_mean(tf.square(y - predicted)) * tf.reduce_sum(weights) / 200

    return loss


def model(kind: str) -> keras.Model:
    x = keras.Input((24,))
    hidden: Any = x
    if kind == "table":
        hidden = Table(1)(x)
    elif kind == "large table":
        hidden = Table(4000)(x)
    elif kind == "statistics":
        hidden = keras.layers.Normalization(mean=X.mean(0), variance=X.var(0))(x)
    elif kind == "variable":
        hidden = Counter()(x)
    made = keras.Model(x, dense(1, 1)(hidden))
    made.compile(optimizer=keras.optimizers.SGD(0.002), loss=weighted() if kind == "loss" else "mse")
    return made


def data() -> dict[str, Any]:
    y = X[:, :4].sum(1, keepdims=True)
    return {"train": (X, y), "validation": (X[:19], y[:19])}


def histories(strategy: str, folder: Path) -> Any:
    """Return the history of a training of each kind, and Keras's own."""
    from distlaunch import notebook

    found = {}
    for kind in KINDS:
        config = {
            "name": "constants",
            "model": {"function": f"{HERE}:model", "args": {"kind": kind}},
            "data": {"function": f"{HERE}:data", "global_batch": 8, "shuffle": False},
            "train": {"epochs": 2},
            **STRATEGIES[strategy],
        }
        ours = notebook.train(config, runs_dir=folder / kind).history
        splits = data()
        theirs = model(kind).fit(
            *splits["train"], batch_size=8, epochs=2, shuffle=False, verbose=0,
            validation_data=splits["validation"], validation_batch_size=8,
        )  # fmt: skip
        found[kind] = ours, theirs.history
    return found


def refused(strategy: str, folder: Path) -> Any:
    """Return what is said about a plain variable of TensorFlow."""
    from distlaunch import notebook
    from distlaunch.base.errors import ConfigError

    config = {
        "name": "constants",
        "model": {"function": f"{HERE}:model", "args": {"kind": "variable"}},
        "data": {"function": f"{HERE}:data", "global_batch": 8},
        **STRATEGIES[strategy],
    }
    try:
        notebook.train(config, runs_dir=folder)
    except ConfigError as error:
        return str(error)
    return "trained"
