"""Builds a model on JAX as it is built on TensorFlow: with the same initial weights, and BatchNorm over all replicas.

The random generators of TensorFlow and JAX differ, so a model would begin elsewhere, and no run on JAX could be
compared with one on TensorFlow. Drawn on the host, initial weights also depend on no layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.jax import random as keras_random

_INT32_MAX = 2**31 - 1


def _normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return tf.random.stateless_normal(shape, seed, mean, stddev, dtype or keras_random.floatx())


def _truncated_normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return tf.random.stateless_truncated_normal(shape, seed, mean, stddev, dtype or keras_random.floatx())


def _uniform(seed: Any, shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None) -> Any:
    kind = dtype or keras_random.floatx()
    return tf.random.stateless_uniform(shape, seed, tf.cast(minval, kind), tf.cast(maxval, kind), kind)


_DRAWS = {"normal": _normal, "truncated_normal": _truncated_normal, "uniform": _uniform}


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Models are made within it."""
    with tensorflow_draws(), synchronized_accepted():
        yield


@contextlib.contextmanager
def synchronized_accepted() -> Iterator[None]:
    """Within it, `BatchNormalization(synchronized=True)` is accepted: a mesh has no other statistics."""
    cls = keras.layers.BatchNormalization
    original = cls.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("synchronized", None)
        original(self, *args, **kwargs)

    cls.__init__ = initialize
    try:
        yield
    finally:
        cls.__init__ = original


@contextlib.contextmanager
def tensorflow_draws() -> Iterator[None]:
    """Within it, what Keras draws outside of traced functions is what it draws on TensorFlow."""
    originals = {name: getattr(keras_random, name) for name in _DRAWS}
    for name, draw in _DRAWS.items():
        setattr(keras_random, name, _instead_of(originals[name], draw))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(keras_random, name, original)


def _instead_of(original: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
        given = keras_random.jax_draw_seed(seed)
        if isinstance(given, jax.core.Tracer):
            return original(*args, seed=given, **kwargs)
        with tf.device("CPU:0"):
            return jax.numpy.asarray(draw(_tensorflow_seed(given), *args, **kwargs).numpy())

    return drawn


def _tensorflow_seed(seed: Any) -> np.ndarray:
    """As Keras makes it of its 64-bit seeds on TensorFlow."""
    return (np.asarray(seed).astype(np.int64) % (_INT32_MAX - 1)).astype(np.int32)
