import time

import keras
import numpy as np
import tensorflow as tf

import distlaunch


def model():
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(3)]  # far faster than the input
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])


class LateModel(keras.Model):
    """A model whose step takes longer in one of the tasks."""

    def train_step(self, data):
        x, y = data
        if distlaunch.task().index == 1:
            x, _ = wait(x, y)
        return super().train_step((x, y))


def late_model():
    plain = model()
    return LateModel(plain.inputs, plain.outputs)


class Late(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if distlaunch.task().index == 1:
            time.sleep(0.04)


def data():
    return np.ones((320, 16), "float32"), np.ones((320, 1), "float32")


def wait(x, y):
    def sleep(value):
        time.sleep(0.01)
        return value

    waited = tf.numpy_function(sleep, [x], tf.float32)
    waited.set_shape(x.shape)
    return waited, y


def double(x, y):
    return x * 2, y
