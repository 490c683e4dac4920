"""Models that show whether they were called before training, and with how many rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

Splits = dict[str, tuple[np.ndarray, np.ndarray]]


def dense(units: int, seed: int, **options: Any) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **options)


@keras.saving.register_keras_serializable("probe")
class Sampling(keras.layers.Layer):
    """Draws in predictions, too, as variational autoencoders do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(11)

    def call(self, inputs: Any) -> Any:
        return inputs + 0.3 * keras.random.normal(ops.shape(inputs), seed=self.generator)


@keras.saving.register_keras_serializable("probe")
class Fading(keras.layers.Layer):
    """Counts its calls."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs / self.calls


@keras.saving.register_keras_serializable("probe")
class Compared(keras.Model):
    """Its loss takes the three largest values of a batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner, self.sampling = dense(4, 1), Sampling()

    def call(self, inputs: Any) -> Any:
        return self.sampling(self.inner(inputs))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        again = self(ops.flip(x, axis=1), training=training)
        return ops.mean(ops.square(y_pred - y)) + 0.1 * ops.mean(ops.top_k(ops.sum(again, -1), 3)[0])


def sampling() -> keras.Model:
    return _compiled(keras.Sequential([keras.Input((6,)), dense(5, 1), Sampling(), dense(1, 2)]))


def fading() -> keras.Model:
    # Keras builds its layer with the first batch
    return _compiled(keras.Sequential([dense(5, 1), Fading(), dense(1, 2)]))


def compared() -> keras.Model:
    return _compiled(Compared())


def recurrent(batch: int = 8) -> keras.Model:
    x = keras.Input(batch_shape=(batch, 6))
    sequence = keras.layers.Reshape((2, 3))(x)
    options = {"kernel_initializer": keras.initializers.GlorotUniform(seed=1)}
    options["recurrent_initializer"] = keras.initializers.Orthogonal(seed=2)
    hidden = keras.layers.LSTM(4, stateful=True, name="memory", **options)(sequence)
    return _compiled(keras.Model(x, dense(1, 3)(hidden)))


def recurrent_sequence(batch: int = 8) -> keras.Model:
    layers = [keras.Input(batch_shape=(batch, 6)), keras.layers.Reshape((2, 3))]
    return _compiled(keras.Sequential([*layers, keras.layers.LSTM(4, stateful=True, name="memory"), dense(1, 3)]))


def reshaped(batch: int = 8) -> keras.Model:
    x = keras.Input(batch_shape=(batch, 6))
    joined = keras.layers.Lambda(lambda value: ops.reshape(value, (batch, 2, 3)), output_shape=(2, 3))(x)
    return _compiled(keras.Model(x, dense(1, 3)(keras.layers.Flatten()(joined))))


def _compiled(model: keras.Model) -> keras.Model:
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model


def data(rows: int = 40) -> Splits:
    random = np.random.default_rng(5)
    x = random.normal(size=(rows, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    return {"train": (x, y), "validation": (x[: rows // 5 * 2], y[: rows // 5 * 2])}
