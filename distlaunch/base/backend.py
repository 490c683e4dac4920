"""On what Keras runs in this process: says so before it is imported."""

from __future__ import annotations

import importlib.util
import os

from distlaunch.base.errors import ConfigError, Problem


def choose_backend(kind: str) -> None:
    """The backend of a kind of strategy.

    Raises:
        ConfigError: it is not installed.
    """
    if kind != "jax":
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        return
    os.environ["KERAS_BACKEND"] = "jax"
    if importlib.util.find_spec("jax") is None:
        message = "got 'jax', but JAX is not installed: pip install 'distlaunch[jax]', or 'jax[cuda13]' for GPUs"
        raise ConfigError(Problem(("strategy", "kind"), message))
