"""The linear regression of TensorFlow's multi-worker migration guide: three rows to train on, three to evaluate."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def linear() -> keras.Model:
    """One dense unit on two features."""
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def three_rows() -> dict[str, Any]:
    """The guide's six rows; features float32 [3, 2], labels float32 [3, 1]."""
    train = ([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], [[0.3], [0.5], [0.7]])
    validation = ([[4.0, 4.5], [5.0, 5.5], [6.0, 6.5]], [[0.8], [0.9], [1.0]])
    return {
        "train": tuple(np.array(part, np.float32) for part in train),
        "validation": tuple(np.array(part, np.float32) for part in validation),
        "origin": "built in",
    }


def repeated_rows(batch: int = 64) -> dict[str, Any]:
    """The guide's pipelines: its rows shuffled and repeated for ever, in batches; its evaluation rows one by one."""
    import tensorflow as tf

    rows = three_rows()
    # one order for every iterator, so that each process that reads sees the same batches
    shuffled = tf.data.Dataset.from_tensor_slices(rows["train"]).shuffle(10, seed=0, reshuffle_each_iteration=False)
    train = shuffled.repeat().batch(batch)
    validation = tf.data.Dataset.from_tensor_slices(rows["validation"]).repeat().batch(1)
    return {"train": train, "validation": validation, "origin": "built in"}
