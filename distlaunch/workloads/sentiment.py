"""Film reviews, and a classifier for them that is a `tf.Module`, as in TensorFlow's DTensor tutorial."""

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
"""Number of reviews at the end of the file that are used for validation; the 8,000 others are for training."""
CLASSES = 2


def reviews() -> dict[str, Any]:
    """Return 9,173 sentences of film reviews as text, with label 1 for positive and 0 for negative reviews."""
    lines = gzip.decompress(SHIPPED.read_bytes()).decode().splitlines()
    labels, texts = zip(*(line.split("\t", 1) for line in lines), strict=True)
    x, y = np.array(texts, dtype=object), np.array(labels, dtype=np.int64)
    return {
        "train": (x[:-VALIDATION], y[:-VALIDATION]),
        "validation": (x[-VALIDATION:], y[-VALIDATION:]),
        "origin": "the film reviews shipped with distlaunch",
    }


def vectorizer(texts: tf.data.Dataset, max_tokens: int = 1200) -> keras.Layer:
    """Return a layer that turns text into tf-idf weights of the most common words: [rows] -> [rows, max_tokens]."""
    layer = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=max_tokens)
    layer.adapt(texts)
    return layer


class Dense(tf.Module):
    """Dense layer: `activation(x @ weight + bias)`."""

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
    """Normalization of each feature, by the batch's statistics in training and by moving averages otherwise."""

    def __init__(self, features: int, momentum: float = 0.99) -> None:
        super().__init__()
        self.mean = tf.Variable(tf.zeros([features]), trainable=False)
        self.variance = tf.Variable(tf.ones([features]), trainable=False)
        self.momentum = momentum

    def __call__(self, x: Any, training: bool = False) -> Any:
        if training:
            # a mesh can sum both means in one communication; tf.nn.moments would need two
            mean, mean_square = tf.reduce_mean(x, axis=0), tf.reduce_mean(x * x, axis=0)
            variance = tf.nn.relu(mean_square - mean * mean)
            self.mean.assign(self.mean * self.momentum + mean * (1 - self.momentum))
            self.variance.assign(self.variance * self.momentum + variance * (1 - self.momentum))
        else:
            mean, variance = tf.convert_to_tensor(self.mean), tf.convert_to_tensor(self.variance)
        scale = tf.math.rsqrt(variance + 1e-3)
        return x * scale - mean * scale


class SentimentMLP(tf.Module):
    """Classifier with one hidden layer, which computes logits: [rows, tokens] -> [rows, 2]."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.dense1 = Dense(tokens, hidden, (1, 2), tf.nn.relu)
        self.norm = BatchNorm(hidden)
        self.dense2 = Dense(hidden, CLASSES, (3, 4))

    def __call__(self, x: Any, training: bool = False) -> Any:
        x = self.dense1(x)
        x = self.norm(x, training)
        return self.dense2(x)


def mlp(tokens: int = 1200, hidden: int = 48) -> tf.Module:
    """Return the tutorial's model: two dense layers with batch normalization between them."""
    return SentimentMLP(tokens, hidden)


def step(context: Any, batch: Any) -> dict[str, Any]:
    """Run the tutorial's training step, which minimizes the sum of the losses and reports their mean."""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = context.model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = context.sum(losses)
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, logits)
    return {"loss": context.average(losses)}
