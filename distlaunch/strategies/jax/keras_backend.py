"""Builds a model on JAX as on TensorFlow: with the same initial weights, and BatchNorm over all replicas.

It also makes random layers draw the same numbers in each step. The random generators of TensorFlow and JAX differ, so
models would start differently, and runs on JAX could not be compared with runs on TensorFlow. Drawn on the host,
initial weights are also independent of layouts.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.code_origins import user_line
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_batch_norm import accept_synchronized
from distlaunch.patches.keras_random_on_jax import Draw, draw_with
from distlaunch.strategies.jax import random as jax_random

_INT32_MAX = 2**31 - 1
_LIBRARIES = {"tensorflow": "TensorFlow", "numpy": "NumPy"}
_PARTS = {keras.Layer: "layer", keras.losses.Loss: "loss", keras.metrics.Metric: "metric"}


def _normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return tf.random.stateless_normal(shape, seed, mean, stddev, dtype or keras.config.floatx())


def _truncated_normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return tf.random.stateless_truncated_normal(shape, seed, mean, stddev, dtype or keras.config.floatx())


def _uniform(seed: Any, shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None) -> Any:
    kind = dtype or keras.config.floatx()
    return tf.random.stateless_uniform(shape, seed, tf.cast(minval, kind), tf.cast(maxval, kind), kind)


def _normal_in_step(seed: Any, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None) -> Any:
    kind = dtype or keras.config.floatx()
    return jax_random.normal(seed, shape, kind) * stddev + mean if jax_random.is_supported(kind) else None


def _uniform_in_step(seed: Any, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None) -> Any:
    kind = dtype or keras.config.floatx()
    return jax_random.uniform(seed, shape, kind) * (maxval - minval) + minval if jax_random.is_supported(kind) else None


def _dropout_in_step(seed: Any, inputs: Any, rate: float, noise_shape: Any = None) -> Any:
    if rate in (0, 1) or not jax_random.is_supported(inputs.dtype):
        return None
    shape = inputs.shape
    if noise_shape is not None:
        shape = [have if given is None else given for given, have in zip(noise_shape, shape, strict=True)]
    # "at least", as in `tf.nn.dropout`: with "above" the mask would differ where a number equals the rate
    kept = jax_random.uniform(seed, shape, inputs.dtype) >= jnp.asarray(rate, inputs.dtype)
    scale = jnp.asarray(1.0 / (1.0 - rate), inputs.dtype)
    return jnp.where(kept, inputs * scale, jnp.zeros_like(inputs))


_BY_TENSORFLOW: dict[str, Draw] = {"normal": _normal, "truncated_normal": _truncated_normal, "uniform": _uniform}
_IN_STEP: dict[str, Draw] = {"normal": _normal_in_step, "uniform": _uniform_in_step, "dropout": _dropout_in_step}
"""Functions that draw in a step; they return None where JAX has to draw."""


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Build models in this context."""
    with name_foreign_calls(), tensorflow_draws(), accept_synchronized():
        yield


def draw_like_tensorflow(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step, to be traced, whose random layers draw the same numbers as on TensorFlow."""

    def traced(*args: Any) -> Any:
        with name_foreign_calls(), tensorflow_draws():
            return step(*args)

    return traced


def tensorflow_draws() -> AbstractContextManager[None]:
    """Return a context in which Keras draws the same numbers as on TensorFlow.

    In traced functions that applies to normal and uniform numbers and dropout, of types that `jax_random.is_supported`;
    JAX draws everything else.
    """
    return draw_with({name: _on_host(draw) for name, draw in _BY_TENSORFLOW.items()}, _IN_STEP)


def _on_host(draw: Draw) -> Draw:
    def drawn(seed: Any, *args: Any, **kwargs: Any) -> jax.Array:
        # GPUs of this process belong to JAX; TensorFlow only draws and reads data
        with tf.device("CPU:0"):
            return jnp.asarray(draw(_tensorflow_seed(seed), *args, **kwargs).numpy())

    return drawn


def _tensorflow_seed(seed: Any) -> np.ndarray:
    """Return the seed that Keras derives from its 64-bit seeds on TensorFlow."""
    return (np.asarray(seed).astype(np.int64) % (_INT32_MAX - 1)).astype(np.int32)


@contextlib.contextmanager
def name_foreign_calls() -> Iterator[None]:
    """Replace JAX's error about an array that another library requests by one that names the layer.

    Raises:
        ConfigError: instead of JAX's error.
    """
    try:
        yield
    except Exception as error:
        # Keras tries to raise JAX's error with another text, which may fail with an error of its own
        found = next((one for one in _chain(error) if isinstance(one, jax.errors.TracerArrayConversionError)), None)
        if found is None:
            raise
        message = f"{_part(found)}{user_line(found)} computes with {_library(found)}, which cannot be traced by JAX"
        hint = "strategy jax needs keras.ops instead; the other strategies run on TensorFlow"
        raise ConfigError(Problem(("model", "function"), f"{message}; {hint}")) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _library(error: BaseException) -> str:
    files = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for package, name in _LIBRARIES.items() if any(package in parts for parts in files)), "NumPy")


def _part(error: BaseException) -> str:
    """Return the innermost layer, loss or metric in the error's traceback, in words."""
    found = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part: Any = frame.f_locals.get("self")
        for kind, what in _PARTS.items():
            if isinstance(part, kind) and frame.f_code.co_name in ("call", "update_state", "result"):
                found = f"{what} '{part.name}' ({type(part).__name__})"
    return found
