"""Imports TensorFlow, JAX and Keras in the least time."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterable, Iterator

from distlaunch.patches.tensorflow_lite import without_jax


def import_frameworks(backend: str, names: Iterable[str]) -> None:
    """Import frameworks.

    Args:
        backend: the backend of Keras. With TensorFlow, JAX is not imported, although it can be afterwards.
        names: the modules.
    """
    with contextlib.nullcontext() if backend == "jax" else without_jax(), _no_collection():
        for name in names:
            importlib.import_module(name)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off, and exclude the objects that were created from later collections.

    The imports create a million objects that stay. Looking through them again and again takes a fifth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
