"""Models and data for the parity tests: small, but with everything that can go wrong between replicas."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from distlaunch.workloads.recommender import factorization, generated_ratings

FEATURES, CLASSES = 12, 4
layers = keras.layers


def table(rows: int = 300, batch: int = 24, permute: int = 0, weights: bool = False, skew: bool = False) -> dict:
    """A learnable table; 300 rows in batches of 24 leave a last batch of 12, 305 one of 17.

    Args:
        permute: not 0: permutes rows within each batch, which changes nothing but the order of sums.
        weights: sample weights between 0 and 2, very different from row to row.
        skew: labels sorted within the batch, so that replicas see different classes.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int64)
    w = (rng.uniform(size=rows).astype(np.float32) ** 4) * 2
    order = np.arange(rows)
    if skew:
        order = np.concatenate([b[np.argsort(y[b], kind="stable")] for b in np.split(order, range(batch, rows, batch))])
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(order, range(batch, rows, batch))])
    arrays = (x[order], y[order], w[order]) if weights else (x[order], y[order])
    return {"train": arrays, "validation": (x[:50], y[:50])}


def images(rows: int = 200, batch: int = 24, permute: int = 0) -> dict:
    """Small pictures with a learnable class."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 12, 12, 1)).astype(np.float32)
    y = (x[:, :6].mean((1, 2, 3)) > x[:, 6:].mean((1, 2, 3))).astype(np.int64)
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(np.arange(rows), range(batch, rows, batch))])
        x, y = x[order], y[order]
    return {"train": (x, y), "validation": (x[:37], y[:37])}


def unknown_length(rows: int = 305, batch: int = 24, permute: int = 0) -> dict:
    """The table as a pipeline that does not know its length."""
    arrays = table(rows, batch, permute)
    train = tf.data.Dataset.from_tensor_slices(arrays["train"]).filter(lambda x, y: True)
    return {"train": train, "validation": arrays["validation"]}


def two_inputs(rows: int = 300, batch: int = 24, permute: int = 0) -> dict:
    """Two named inputs, two named outputs."""

    def named(split: tuple) -> tuple:
        x, y = split
        return {"left": x[:, :5], "right": x[:, 5:]}, {"label": y, "total": x.sum(1, keepdims=True)}

    return {name: named(split) for name, split in table(rows, batch, permute).items()}


def sequences(rows: int = 300, batch: int = 24, permute: int = 0) -> dict:
    """Sequences of tokens of different lengths, padded with 0, a label for each token."""
    rng = np.random.default_rng(2)
    x = rng.integers(1, 20, size=(rows, 7))
    x[np.arange(7)[None] >= rng.integers(1, 8, size=rows)[:, None]] = 0
    order = np.arange(rows)
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(order, range(batch, rows, batch))])
    x = x[order]
    return {"train": (x, x % CLASSES), "validation": (x[:50], x[:50] % CLASSES)}


def mlp(l2: float = 0.0, activity: float = 0.0) -> keras.Model:
    """A small MLP; `l2` regularises its kernels, and `activity` the outputs of its hidden layer."""
    regularizer = keras.regularizers.L2(l2) if l2 else None
    of_activity = keras.regularizers.L2(activity) if activity else None
    return keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(32, activation="relu", kernel_regularizer=regularizer, activity_regularizer=of_activity),
            layers.Dense(CLASSES, kernel_regularizer=regularizer),
        ]
    )


def subclassed() -> keras.Model:
    return Subclassed()


class Subclassed(keras.Model):
    """Not built before it has seen data."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(32, activation="tanh"), layers.Dense(CLASSES)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(self.hidden(x))


def own_train_step() -> keras.Model:
    return OwnStep()


class OwnStep(Subclassed):
    """A `train_step` of its own that adds a penalty and returns a value that is no metric."""

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(0.0)
            else:
                metric.update_state(y, logits)
        return {"mean_logit": tf.reduce_mean(logits), "rows": tf.constant(1.0)}


class TwoOptimizers(Subclassed):
    """Its last layer has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self(np.zeros((1, FEATURES), np.float32))
        self.second = keras.optimizers.Adam(0.02)
        self.second.build(self.layers[-1].trainable_variables)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        last = self.layers[-1].trainable_variables
        first = [variable for variable in self.trainable_variables if all(variable is not other for other in last)]
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        gradients = tape.gradient(loss, first + last)
        self.optimizer.apply(gradients[: len(first)], first)
        self.second.apply(gradients[len(first) :], last)
        return {"mean_logit": tf.reduce_mean(logits)}


def two_optimizers() -> keras.Model:
    """Return a model with two optimizers, like a GAN."""
    return TwoOptimizers()


class Affine(tf.Module):
    """A layer without Keras."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        rng = np.random.default_rng(outputs)
        self.kernel = tf.Variable(rng.normal(scale=inputs**-0.5, size=(inputs, outputs)).astype(np.float32))
        self.bias = tf.Variable(tf.zeros([outputs]))

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.kernel + self.bias


class Affines(tf.Module):
    """Attributes named like the layers of the Sequential models, so that the same layout rules fit."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dense_1 = Affine(FEATURES, 32), Affine(32, CLASSES)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense_1(tf.nn.relu(self.dense(x)))


def module() -> tf.Module:
    """A model that is no Keras model."""
    return Affines()


def convolutions() -> keras.Model:
    """Convolutions with BatchNorm over all replicas."""
    return keras.Sequential(
        [
            layers.Input((12, 12, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def two_outputs() -> keras.Model:
    left, right = keras.Input((5,), name="left"), keras.Input((7,), name="right")
    x = layers.Dense(16, activation="relu")(layers.Concatenate()([left, right]))
    outputs = {"label": layers.Dense(CLASSES, name="label")(x), "total": layers.Dense(1, name="total")(x)}
    return keras.Model({"left": left, "right": right}, outputs)


def tagger() -> keras.Model:
    """Masked: padding counts neither in the loss nor in the metrics."""
    return keras.Sequential(
        [layers.Input((7,), dtype="int64"), layers.Embedding(20, 8, mask_zero=True), layers.Dense(CLASSES)]
    )


def own_step(context, batch):
    """A step function of the user's, with Python control flow on a tensor."""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = context.model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        if tf.reduce_max(tf.abs(logits)) > 1e6:
            losses = tf.zeros_like(losses)
        loss = context.average(losses) + context.regularization()
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, logits)
    return {"loss": loss, "hits": context.average(tf.cast(tf.argmax(logits, -1) == y, tf.float32))}


def ratings(rows: int = 305, batch: int = 24, permute: int = 0) -> dict:
    """Ratings of few users and items, so that batches hold the same ids several times."""
    made = generated_ratings(users=40, items=30, ratings=rows + 50)

    def split(part: slice, order: np.ndarray) -> tuple:
        x, y = made["train"] if part.stop else made["validation"]
        return {name: values[part][order] for name, values in x.items()}, y[part][order]

    order = np.arange(rows)
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(order, range(batch, rows, batch))])
    return {"train": split(slice(0, rows), order), "validation": split(slice(None), np.arange(30))}


def recommender() -> keras.Model:
    """Two embedding tables and their biases."""
    return factorization(users=40, items=30, dim=6)


def random_layers() -> keras.Model:
    """Uniform and normal numbers, a mask of its own shape, BatchNorm between."""
    return keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.GaussianNoise(0.1),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(synchronized=True),
            layers.Dropout(0.5),
            layers.Reshape((4, 8)),
            layers.SpatialDropout1D(0.2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
