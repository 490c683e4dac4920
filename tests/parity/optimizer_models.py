"""Models and data whose optimizers have a state that must be kept when a run resumes or ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import keras
import numpy as np

ROWS, BATCH = 96, 24
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def data() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS + 32, 6)).astype("float32")
    y = (np.sin(x).sum(1, keepdims=True) + 0.1).astype("float32")
    return {"train": (x[:ROWS], y[:ROWS]), "validation": (x[ROWS:], y[ROWS:])}


def initializer(seed: int) -> Any:
    """Return an initializer with the same values on every backend."""

    def draw(shape: Any, dtype: Any = None) -> Any:
        del dtype
        values = np.random.default_rng(seed).normal(scale=shape[0] ** -0.5, size=shape)
        return keras.ops.convert_to_tensor(values.astype("float32"))

    return draw


def mlp(frozen: bool = False) -> keras.Model:
    first = keras.layers.Dense(8, "tanh", kernel_initializer=initializer(1), name="body")
    first.trainable = not frozen
    return keras.Sequential(
        [
            keras.Input((6,)),
            first,
            keras.layers.Dense(5, "tanh", kernel_initializer=initializer(2), name="middle"),
            keras.layers.Dense(1, kernel_initializer=initializer(3), name="head"),
        ]
    )


def compiled(frozen: bool = False, rate: Any = 0.05, name: str = "SGD", **settings: Any) -> keras.Model:
    model = mlp(frozen)
    model.compile(getattr(keras.optimizers, name)(rate, **settings), "mse")
    return model


def two_in_one(frozen: bool = False, ema: bool = True) -> keras.Model:
    """Two optimizers in Keras's `MultiOptimizer`, with averages of their own."""
    model = mlp(frozen)
    body = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=ema, ema_momentum=0.7)
    head = keras.optimizers.Adam(0.01, use_ema=ema, ema_momentum=0.4)
    model.compile(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(body, {".*/head/.*": head})), "mse")
    return model


def scaled(**settings: Any) -> keras.Model:
    model = mlp()
    inner = keras.optimizers.Adam(0.01, **settings)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10), "mse")
    return model


class Parts(keras.Model):
    """A body and a head, each with an optimizer that `kind` says where to find, and a count of steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")
        self.kind = kind
        self.body = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh", kernel_initializer=initializer(1))], name="body"
        )
        self.head = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(1, kernel_initializer=initializer(2))], name="head"
        )
        first, second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9)
        if kind == "dict":
            self.optimizers = {"first": first, "deep": [{"second": second}]}
        elif kind == "sub-models":
            self.body.compile(first)
            self.head.compile(second)
        elif kind == "object":
            self.held = SimpleNamespace(first=first, second=second)
        else:
            self.first, self.second = first, second

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))

    def _pair(self) -> tuple[Any, Any]:
        if self.kind == "dict":
            return self.optimizers["first"], self.optimizers["deep"][0]["second"]
        if self.kind == "sub-models":
            return self.body.optimizer, self.head.optimizer
        return (self.held.first, self.held.second) if self.kind == "object" else (self.first, self.second)

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        body, head = self.body.trainable_variables, self.head.trainable_variables
        with tf.GradientTape() as tape:
            per_row = keras.losses.mean_squared_error(y, self(x, training=True))
            loss = tf.reduce_mean(per_row)
        gradients = tape.gradient(loss, [*body, *head])
        first, second = self._pair()
        first.apply_gradients(zip(gradients[: len(body)], body, strict=True))
        second.apply(gradients[len(body) :], head)
        self.tracker.update_state(per_row)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


def parts(kind: str) -> keras.Model:
    model = Parts(kind)
    model.compile(loss="mse")
    return model


class Counting(keras.Model):
    """Learns less with each step, by a plain variable of TensorFlow."""

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__()
        self.net = mlp()
        self.kept = {"steps": tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)}

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        self.kept["steps"].assign_add(1.0)
        self.net.layers[-1].kernel.assign(self.net.layers[-1].kernel * (1 - 0.1 / (1 + self.kept["steps"])))
        return logs


def counting() -> keras.Model:
    model = Counting()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class Doubles(keras.callbacks.Callback):
    """Sets a learning rate at the start of each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.25


class Judges(keras.callbacks.Callback):
    """Predicts and evaluates itself, after each epoch and within an epoch, and keeps the results."""

    seen: ClassVar[list[list[float]]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (x, y), model = data()["validation"], self.model
        inner = model.layers[0]
        found = [*model.evaluate(x[:20], y[:20], verbose=0), np.sum(model.predict(x[:7], verbose=0))]
        found += [np.sum(model.predict_on_batch(x[:5])), np.sum(inner.predict(x[:9], verbose=0)), logs["loss"]]
        Judges.seen.append([float(one) for one in found])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.on_epoch_end(-1, logs)


def nested(rate: float = 0.05) -> keras.Model:
    """A model within a model, with statistics."""
    inner = mlp()
    model = keras.Sequential(
        [keras.Input((6,)), inner, keras.layers.BatchNormalization(momentum=0.5, synchronized=ON_TENSORFLOW)],
        name="outer",
    )
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    return model
