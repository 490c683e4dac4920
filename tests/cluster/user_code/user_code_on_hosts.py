import argparse
import signal

import keras
import numpy as np
from absl import flags

ARGS = argparse.ArgumentParser().parse_args()
flags.DEFINE_integer("width", 3, "")
flags.FLAGS(__import__("sys").argv)
signal.signal(signal.SIGTERM, lambda *_: None)
WORDS = ["red", "green", "blue"]


def model():
    word, number = keras.Input((1,), dtype="string", name="word"), keras.Input((2,), name="number")
    index = keras.layers.StringLookup(vocabulary=WORDS, output_mode="one_hot")(word)
    out = keras.layers.Dense(1)(keras.layers.Concatenate()([index, number]))
    model = keras.Model([word, number], out)
    model.set_weights([np.full(each.shape, 0.1, "float32") for each in model.weights])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def data():
    number = (np.arange(192, dtype="float32").reshape(96, 2) % 11) / 11
    word = np.array([WORDS[row % 3] for row in range(96)])[:, None]
    return {"train": ({"word": word, "number": number}, number.sum(1, keepdims=True))}
