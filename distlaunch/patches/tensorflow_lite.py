"""Imports TensorFlow without JAX, which its converter for TFLite imports where it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, cast

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(Symbol("tensorflow.lite.python.util._jit"),),
    why="Where JAX is installed, `import tensorflow` imports it, a seventh of the time (0.5 s), for "
    "`TFLiteConverter.experimental_from_jax`, which nothing here uses.",
    until="tensorflow.lite imports JAX where it converts a function of JAX.",
)


@contextlib.contextmanager
def without_jax() -> Iterator[None]:
    """Within it, importing JAX fails, as where it is not installed; afterwards it can be imported."""
    if "jax" in sys.modules:
        yield
        return
    modules = cast("dict[str, Any]", sys.modules)
    modules["jax"] = None
    try:
        yield
    finally:
        del modules["jax"]
