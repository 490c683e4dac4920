"""`data.class_weight`: uses the weight of each example's class as its sample weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch
from distlaunch.patches.tensorflow_late import tf


def class_weights(weights: Mapping[int, float]) -> Callable[[Batch], Batch]:
    """Return a function that adds sample weights to a batch (x, y), as Keras `fit(class_weight=...)` does.

    Classes that are not listed have the weight 1.
    """
    table = np.ones(max(weights) + 1, np.float32)
    for label, weight in weights.items():
        table[label] = weight

    def weigh(batch: Batch) -> Batch:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ConfigError(Problem(("data", "class_weight"), "needs batches (x, y) without sample weights"))
        x, y = batch
        if isinstance(y, (dict, tuple, list)):
            message = "supports models with one output only, but the labels have several parts; use sample weights"
            raise ConfigError(Problem(("data", "class_weight"), message))
        if isinstance(y, np.ndarray):
            return x, y, _weights_on_host(table, y)
        labels = _classes(y)
        known = tf.gather(table, tf.clip_by_value(labels, 0, len(table) - 1))
        return x, y, tf.where((labels >= 0) & (labels < len(table)), known, tf.ones_like(known))

    return weigh


def _classes(y: tf.Tensor) -> tf.Tensor:
    """Return the class of each label, as int64."""
    if y.shape.rank is None or y.shape.rank < 2:
        return _rounded(y)
    columns = y.shape[-1]
    if columns is None:  # it is known only when a batch is there
        return tf.cond(tf.shape(y)[-1] == 1, lambda: _rounded(tf.squeeze(y, -1)), lambda: tf.argmax(y, -1))
    return _rounded(tf.squeeze(y, -1)) if columns == 1 else tf.argmax(y, -1)


def _rounded(labels: tf.Tensor) -> tf.Tensor:
    # a label of 0.95 is of class 1, as in Keras
    return tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)


def _weights_on_host(table: np.ndarray, y: np.ndarray) -> np.ndarray:
    labels = y
    if labels.ndim > 1:
        labels = np.squeeze(labels, -1) if labels.shape[-1] == 1 else np.argmax(labels, -1)
    labels = np.round(labels).astype(np.int64)
    known = table[np.clip(labels, 0, len(table) - 1)]
    return np.where((labels >= 0) & (labels < len(table)), known, np.float32(1.0))
