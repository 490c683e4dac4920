import gzip
import os

import keras
import numpy as np
import tensorflow as tf

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = np.random.default_rng(0).normal(size=(300, 6)).astype("float32")
LENGTHS = [31, 52, 24, 45]


def write():
    for number, length in enumerate(LENGTHS):
        with gzip.open(f"{HERE}/part-{number}.gz", "wt") as file:
            file.writelines(f"{sum(LENGTHS[:number]) + at}\n" for at in range(length))


def numbers(context):
    files = [f"{HERE}/part-{number}.gz" for number in range(4)][context.stream :: context.num_streams]
    lines = tf.data.TextLineDataset(files, compression_type="GZIP")
    return {"train": lines, "validation": lines.take(9)}


def look(line):
    def read(number):
        with open(f"read-{os.getpid()}", "a") as file:
            file.write(f"{int(number)}\n")
        return ROWS[number]

    row = tf.ensure_shape(tf.numpy_function(read, [tf.strings.to_number(line, tf.int64)], tf.float32), [6])
    return row, tf.reduce_sum(row)


def noisy(row, total, seed):
    return row + 0.1 * tf.random.stateless_normal([6], seed), total


def own(context, known=True):
    first, stop = (0, 130) if context.worker == 0 else (130, 171)
    if context.num_workers == 1:
        first, stop = 0, 171
    rows = ROWS[first:stop]
    train = rows, rows.sum(1)
    if not known:
        train = tf.data.Dataset.from_tensor_slices(train).filter(lambda x, y: True)
    return {"train": train, "validation": (ROWS[171:200], ROWS[171:200].sum(1))}


def same(context):
    return {"train": (ROWS, ROWS.sum(1))}


def all_files(context):
    return tf.data.TextLineDataset([f"{HERE}/part-{number}.gz" for number in range(4)], compression_type="GZIP")


def model(dropout=0.2):
    layers = keras.layers
    hidden = [layers.Dense(8, "tanh"), layers.Dropout(dropout)]
    return keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(1)])
