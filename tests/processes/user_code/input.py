import os

import numpy as np

ROWS = np.random.default_rng(0).normal(size=(260, 6)).astype("float32")


def note(kind, index):
    with open(f"read-{kind}-{os.getpid()}", "a") as file:
        file.write(f"{int(index)}\n")


import keras
import tensorflow as tf


def numbers():
    return {"train": tf.data.Dataset.range(203), "validation": tf.data.Dataset.range(203, 260)}


def drawn():
    rows = ROWS[:203] * np.random.default_rng().uniform(size=(203, 1)).astype("float32")
    return {"train": (rows, rows.sum(1))}


def look(number):
    def read(number):
        note("train" if number < 203 else "validation", number)
        return ROWS[number]

    row = tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), [6])
    return row, tf.reduce_sum(row)


def noisy(row, total, seed):
    return row + 0.1 * tf.random.stateless_normal([6], seed), total


def spoilt(x, y):
    return x * tf.strings.to_number(tf.where(y < 4.0, "1.0", "many")), y  # spoilt


def drawn_later():
    order = np.arange(203)
    order[150:] = np.random.default_rng().permutation(order[150:])
    return {"train": tf.data.Dataset.from_tensor_slices(order)}


def model():
    layers = keras.layers
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
