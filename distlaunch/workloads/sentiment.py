"""Film reviews and a classifier of them that is a `tf.Module`, as in TensorFlow's DTensor tutorial."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SHIPPED = Path(__file__).parent / "data" / "film_reviews.tsv.gz"
VALIDATION = 1_173
"""Reviews at the end of the file that are not trained on; 8,000 are left."""
CLASSES = 2


def reviews() -> dict[str, Any]:
    """9,173 sentences of film reviews as text, with label 1 for praise and 0 for blame."""
    lines = gzip.decompress(SHIPPED.read_bytes()).decode().splitlines()
    labels, texts = zip(*(line.split("\t", 1) for line in lines), strict=True)
    x, y = np.array(texts, dtype=object), np.array(labels, dtype=np.int64)
    return {
        "train": (x[:-VALIDATION], y[:-VALIDATION]),
        "validation": (x[-VALIDATION:], y[-VALIDATION:]),
        "origin": "the film reviews shipped with distlaunch",
    }


def vectorizer(texts: tf.data.Dataset, max_tokens: int = 1200) -> keras.Layer:
    """Text to the tf-idf weights of the commonest words: [rows] of strings -> [rows, max_tokens]."""
    layer = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=max_tokens)
    layer.adapt(texts)
    return layer


class Dense(tf.Module):
    """activation(x @ weight + bias)."""

    def __init__(
        self, inputs: int, outputs: int, seed: tuple[int, int], activation: Callable[[Any], Any] = tf.identity
    ) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.random.stateless_normal([inputs, outputs], seed, stddev=inputs**-0.5))
        self.bias = tf.Variable(tf.zeros([outputs]))
        self.activation = activation

    def __call__(self, x: Any) -> Any:
        return self.activation(tf.matmul(x, self.weight) + self.bias)


class BatchNorm(tf.Module):
    """Mean 0 and variance 1 for each feature: of the batch in training, of past batches otherwise."""

    def __init__(self, features: int, momentum: float = 0.99) -> None:
        super().__init__()
        self.mean = tf.Variable(tf.zeros([features]), trainable=False)
        self.variance = tf.Variable(tf.ones([features]), trainable=False)
        self.momentum = momentum

    def __call__(self, x: Any, training: bool = False) -> Any:
        if training:
            # both means at once: on a mesh their sums travel together, where tf.nn.moments takes two rounds
            mean, mean_square = tf.reduce_mean(x, axis=0), tf.reduce_mean(x * x, axis=0)
            variance = tf.nn.relu(mean_square - mean * mean)
            self.mean.assign(self.mean * self.momentum + mean * (1 - self.momentum))
            self.variance.assign(self.variance * self.momentum + variance * (1 - self.momentum))
        else:
            mean, variance = tf.convert_to_tensor(self.mean), tf.convert_to_tensor(self.variance)
        scale = tf.math.rsqrt(variance + 1e-3)
        return x * scale - mean * scale


class SentimentMLP(tf.Module):
    """Logits of both classes from word weights: [rows, tokens] -> [rows, 2]."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.dense1 = Dense(tokens, hidden, (1, 2), tf.nn.relu)
        self.norm = BatchNorm(hidden)
        self.dense2 = Dense(hidden, CLASSES, (3, 4))

    def __call__(self, x: Any, training: bool = False) -> Any:
        return self.dense2(self.norm(self.dense1(x), training))


def mlp(tokens: int = 1200, hidden: int = 48) -> tf.Module:
    """The tutorial's model: two dense layers with a normalisation between them."""
    return SentimentMLP(tokens, hidden)


def step(context: Any, batch: Any) -> dict[str, Any]:
    """The tutorial's training step: it descends along the sum of the losses, and reports their mean."""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = context.model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = context.sum(losses)
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, logits)
    return {"loss": context.average(losses)}
