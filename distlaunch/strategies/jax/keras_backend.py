"""Builds models on JAX as on TensorFlow, with the same initial weights, random numbers and BatchNorm over all replicas.

The random generators of TensorFlow and JAX differ. Without this module, runs on JAX could not be compared with runs on
TensorFlow. Initial weights are drawn on the host, so they do not depend on layouts.
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

from distlaunch.base.code_origins import user_line
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.on_host.random import Generator
from distlaunch.patches.keras_batch_norm import accept_synchronized
from distlaunch.patches.keras_flash_attention import without_flash_attention
from distlaunch.patches.keras_kinks_on_jax import gradients_of_tensorflow
from distlaunch.patches.keras_logits_on_jax import losses_from_logits
from distlaunch.patches.keras_random_on_jax import Draw, draw_with
from distlaunch.strategies.jax import random as jax_random

_INT32_MAX = 2**31 - 1
_LIBRARIES = {"tensorflow": "TensorFlow", "numpy": "NumPy"}
_PARTS = {keras.Layer: "layer", keras.losses.Loss: "loss", keras.metrics.Metric: "metric"}


def _normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return _scaled(Generator(seed).normal, shape, mean, stddev, dtype)


def _truncated_normal(seed: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None) -> Any:
    return _scaled(Generator(seed).truncated_normal, shape, mean, stddev, dtype)


def _uniform(seed: Any, shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None) -> Any:
    low, high = (np.asarray(value).astype(_dtype(dtype)) for value in (minval, maxval))
    return Generator(seed).uniform(shape, _dtype(dtype)) * (high - low) + low


def _scaled(draw: Callable[..., np.ndarray], shape: Any, mean: Any, stddev: Any, dtype: Any) -> np.ndarray:
    kind = _dtype(dtype)
    return draw(shape, kind) * np.asarray(stddev).astype(kind) + np.asarray(mean).astype(kind)


def _dtype(given: Any) -> np.dtype[Any]:
    return np.dtype(given or keras.config.floatx())


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
    # >= as in `tf.nn.dropout`, and not >, so that masks are equal where a number equals the rate
    kept = jax_random.uniform(seed, shape, inputs.dtype) >= jnp.asarray(rate, inputs.dtype)
    scale = jnp.asarray(1.0 / (1.0 - rate), inputs.dtype)
    return jnp.where(kept, inputs * scale, jnp.zeros_like(inputs))


_HOST_DRAWS: dict[str, Draw] = {"normal": _normal, "truncated_normal": _truncated_normal, "uniform": _uniform}
_STEP_DRAWS: dict[str, Draw] = {"normal": _normal_in_step, "uniform": _uniform_in_step, "dropout": _dropout_in_step}
"""Functions that draw numbers in a traced step, or return None to let JAX draw them."""


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Build models in this context, with TensorFlow's random numbers and with synchronized BatchNorm, on the host."""
    with name_foreign_calls(), tensorflow_draws(), accept_synchronized(), without_flash_attention():
        yield


def compute_like_tensorflow(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that is traced with the random numbers, losses and gradients at kinks of Keras on TensorFlow."""

    def traced(*args: Any) -> Any:
        with name_foreign_calls(), tensorflow_draws(), gradients_of_tensorflow(), losses_from_logits():
            return step(*args)

    return traced


def tensorflow_draws() -> AbstractContextManager[None]:
    """Return a context in which Keras draws the same numbers as on TensorFlow.

    In traced functions, this applies to normal and uniform numbers and to dropout, for the types of
    `jax_random.is_supported`. JAX draws all others.
    """
    return draw_with({name: _on_host(draw) for name, draw in _HOST_DRAWS.items()}, _STEP_DRAWS)


def _on_host(draw: Draw) -> Draw:
    def drawn(seed: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return jnp.asarray(draw(_tensorflow_seed(seed), *args, **kwargs))

    return drawn


def _tensorflow_seed(seed: Any) -> np.ndarray:
    """Return the seed that Keras derives from its 64-bit seeds on TensorFlow."""
    return (np.asarray(seed).astype(np.int64) % (_INT32_MAX - 1)).astype(np.int32)


@contextlib.contextmanager
def name_foreign_calls() -> Iterator[None]:
    """Raise an error that names the layer, instead of JAX's error, if a layer computes with NumPy or TensorFlow.

    Raises:
        ConfigError: replaces JAX's error.
    """
    try:
        yield
    except Exception as error:
        # JAX's error may be the cause of another error, since Keras replaces its message
        found = next(
            (each for each in _error_chain(error) if isinstance(each, jax.errors.TracerArrayConversionError)), None
        )
        if found is None:
            raise
        message = (
            f"{_name_part(found)}{user_line(found)} computes with {_name_library(found)}, which cannot be traced by JAX"
        )
        hint = "strategy jax needs keras.ops instead; the other strategies run on TensorFlow"
        raise ConfigError(Problem(("model", "function"), f"{message}; {hint}")) from error


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _name_library(error: BaseException) -> str:
    files = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for package, name in _LIBRARIES.items() if any(package in parts for parts in files)), "NumPy")


def _name_part(error: BaseException) -> str:
    """Return the innermost layer, loss or metric in the error's traceback, in words."""
    found = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part: Any = frame.f_locals.get("self")
        for kind, what in _PARTS.items():
            if isinstance(part, kind) and frame.f_code.co_name in ("call", "update_state", "result"):
                found = f"{what} '{part.name}' ({type(part).__name__})"
    return found
