"""Selects the backend of Keras in this process, before Keras is imported."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from distlaunch.base.errors import ConfigError, Problem

Backend = Literal["tensorflow", "jax"]

_INSTALL = {"jax": "JAX is not installed: pip install 'distlaunch[jax]', or 'jax[cuda13]' for GPUs"}
"""Backends that are extras."""


def choose_backend(backend: Backend) -> None:
    """Lets Keras run on a backend, once it is imported.

    TensorFlow's lines on settings, of which parameter servers print pages, are left out unless the user has set
    TF_CPP_MIN_LOG_LEVEL. It is read at the import, so it is the same for all: one warm process then serves all
    strategies of a backend.

    Raises:
        ConfigError: it is not installed.
    """
    if backend == "tensorflow":
        os.environ.setdefault("KERAS_BACKEND", backend)  # another one that the user has set is reported later
    else:
        # not `setdefault`: this strategy works on no other
        os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if missing := missing_backend(backend):
        raise ConfigError(Problem(("strategy", "kind"), f"got '{backend}', but {missing}"))


def missing_backend(backend: Backend) -> str:
    """What to install, if the backend's package is not there; else an empty string."""
    return _INSTALL[backend] if backend in _INSTALL and importlib.util.find_spec(backend) is None else ""
