"""Names the layer that computes with TensorFlow or NumPy where JAX traces a step."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.user_lines import user_line

_LIBRARIES = {"tensorflow": "TensorFlow", "numpy": "NumPy"}
_PARTS = {keras.Layer: "layer", keras.losses.Loss: "loss", keras.metrics.Metric: "metric"}


@contextlib.contextmanager
def foreign_calls_named() -> Iterator[None]:
    """Turn the error that JAX raises for an array that another library asks for into one that names the layer.

    Raises:
        ConfigError: in its place.
    """
    try:
        yield
    except Exception as error:
        # Keras raises an error of its own in its place, which may fail, since JAX's cannot be made from text
        found = next((one for one in _chain(error) if _is_conversion(one)), None)
        if found is None:
            raise
        message = f"{_part(found)}{user_line(found)} computes with {_library(found)}, which cannot be traced by JAX"
        hint = "strategy jax needs keras.ops in their place; the other strategies run on TensorFlow"
        raise ConfigError(Problem(("model", "function"), f"{message}; {hint}")) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _is_conversion(error: BaseException) -> bool:
    return isinstance(error, jax.errors.TracerArrayConversionError)


def _library(error: BaseException) -> str:
    files = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for package, name in _LIBRARIES.items() if any(package in parts for parts in files)), "NumPy")


def _part(error: BaseException) -> str:
    """The innermost layer, loss or metric on the way to the error."""
    found = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part: Any = frame.f_locals.get("self")
        for kind, what in _PARTS.items():
            if isinstance(part, kind) and frame.f_code.co_name in ("call", "update_state", "result"):
                found = f"{what} '{part.name}' ({type(part).__name__})"
    return found
