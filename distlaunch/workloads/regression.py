"""Linear regression from TensorFlow's multi-worker migration guide, on six rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def linear() -> keras.Model:
    """Return a model with one dense unit on two features."""
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def three_rows() -> dict[str, Any]:
    """Return the guide's six rows, three in each split; features float32 [3, 2], labels float32 [3, 1]."""
    x_train = np.array([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], np.float32)
    y_train = np.array([[0.3], [0.5], [0.7]], np.float32)
    x_validation = np.array([[4.0, 4.5], [5.0, 5.5], [6.0, 6.5]], np.float32)
    y_validation = np.array([[0.8], [0.9], [1.0]], np.float32)
    return {"train": (x_train, y_train), "validation": (x_validation, y_validation), "origin": "built in"}


def repeated_rows(batch: int = 64) -> dict[str, Any]:
    """Return the guide's pipelines, both endless: batches of shuffled training rows, and single evaluation rows."""
    import tensorflow as tf

    rows = three_rows()
    # a fixed order, so that each process reads the same batches
    shuffled = tf.data.Dataset.from_tensor_slices(rows["train"]).shuffle(10, seed=0, reshuffle_each_iteration=False)
    train = shuffled.repeat().batch(batch)
    validation = tf.data.Dataset.from_tensor_slices(rows["validation"]).repeat().batch(1)
    return {"train": train, "validation": validation, "origin": "built in"}
