"""Imports TensorFlow without JAX; TensorFlow's converter for TFLite would import JAX if it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, cast

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(Symbol("tensorflow.lite.python.util._jit"),),
    why="If JAX is installed, `import tensorflow` imports it, which takes a seventh of the time (0.5 s), for "
    "`TFLiteConverter.experimental_from_jax`, which is not used here.",
    until="tensorflow.lite imports JAX only to convert a JAX function.",
)


@contextlib.contextmanager
def without_jax() -> Iterator[None]:
    """Make `import jax` fail in this context, as if JAX was not installed, unless it is imported already.

    Afterwards, JAX can be imported.
    """
    if "jax" in sys.modules:
        yield
        return
    modules = cast("dict[str, Any]", sys.modules)
    modules["jax"] = None
    try:
        yield
    finally:
        del modules["jax"]
