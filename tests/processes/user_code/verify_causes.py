import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


class Odd(layers.Dense):
    """Has another gradient on JAX."""

    def call(self, x):
        y = super().call(x)
        return 2 * y - keras.ops.stop_gradient(y) if keras.backend.backend() == "jax" else y


def odd(norm=False):
    """Differs on JAX, for a reason that nothing shows. The GRU draws nothing."""
    inputs = layers.Input((10,))
    x = layers.GRU(8, name="gru")(layers.Reshape((5, 2))(inputs))
    if norm:
        x = layers.BatchNormalization(name="norm")(x)
    x = Odd(16, "relu", name="inner")(x)
    return keras.Model(inputs, layers.Dense(3, name="last")(x))


class MyBatchNorm(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if not training:
            return x - self.mean
        mean = keras.ops.mean(x, 0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - mean


def own_norm(norm=False, rate=0.0):
    parts = [layers.Input((10,)), layers.Dense(16, "relu"), MyBatchNorm(), layers.Dropout(rate)]
    if norm:
        parts += [layers.Dense(16, "relu"), layers.BatchNormalization(name="norm")]
    return keras.Sequential([*parts, layers.Dense(3)])


class Replicated(layers.Layer):
    """Layer that is wrong only if there are several replicas, in its output or in its gradient."""

    def __init__(self, forwards, **kwargs):
        super().__init__(**kwargs)
        self.forwards = forwards

    def call(self, x):
        factor = 1 + 0.1 * (tf.distribute.get_strategy().num_replicas_in_sync - 1)
        if self.forwards:
            return factor * x
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda gradient: factor * gradient))(x)


def wrong(forwards=True, rate=0.0):
    parts = [layers.Dense(16, "relu", name="a"), layers.Dropout(rate), Replicated(forwards, name="culprit")]
    return keras.Sequential([layers.Input((10,)), *parts, layers.Dense(16, name="b"), layers.Dense(3, name="c")])


class Gamma(layers.Layer):
    """Numbers of a kind that each replica draws like the first."""

    def __init__(self):
        super().__init__(name="gamma")
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return x * keras.random.gamma(keras.ops.shape(x), 2.0, seed=self.seeds) if training else x


def gamma():
    return keras.Sequential([layers.Input((10,)), Gamma(), layers.Dense(3)])


def data():
    x = np.random.default_rng(0).normal(size=(89, 10)).astype("float32")
    return {"train": (x, (x[:, 0] > 0) + (x[:, 1] > 0).astype("int64"))}
