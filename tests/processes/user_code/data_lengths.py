import json
import os

import keras
import numpy as np
import tensorflow as tf


def model():
    return keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(1)])


def data(train="whole", validation="whole"):
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    worker = task["index"] if task["type"] == "worker" else 0
    x = np.random.default_rng(0).normal(size=(320, 10)).astype("float32")

    def split(kind):
        number = 320 if kind == "whole" else 320 - 64 * worker
        arrays = x[:number], x[:number].sum(1, keepdims=True)
        if kind != "unknown":
            return arrays
        return tf.data.Dataset.from_tensor_slices(arrays).filter(lambda x, y: True)

    return {"train": split(train), "validation": split(validation)}
