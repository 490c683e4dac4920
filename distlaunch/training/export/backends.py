"""What exporting needs of the backend that Keras runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import keras
import tensorflow as tf


class ExportBackend(Protocol):
    """What differs from backend to backend."""

    makes_saved_models: bool
    """Whether this process can write SavedModels that run everywhere."""

    def building(self) -> AbstractContextManager[None]:
        """While a model is built again from its function."""
        ...

    def exact_products(self) -> AbstractContextManager[None]:
        """While GPUs multiply with all bits, as a CPU does; they use 10 otherwise."""
        ...


class _OnTensorFlow:
    makes_saved_models = True

    def building(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def exact_products(self) -> Iterator[None]:
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        # TensorFloat-32 keeps 10 bits of a fraction: more than `TOLERANCE` off
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)


class _OnJax:
    makes_saved_models = False

    def building(self) -> AbstractContextManager[None]:
        # here: on TensorFlow nobody imports JAX
        from distlaunch.strategies.jax.keras_backend import building

        return building()

    def exact_products(self) -> AbstractContextManager[None]:
        import jax

        return jax.default_matmul_precision("highest")


_BACKENDS: dict[str, ExportBackend] = {"tensorflow": _OnTensorFlow(), "jax": _OnJax()}


def export_backend() -> ExportBackend:
    """That of this process."""
    return _BACKENDS[keras.backend.backend()]
