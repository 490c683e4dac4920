"""Selects the backend of Keras in this process, before Keras is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

from distlaunch.base.errors import ConfigError, Problem

Backend = Literal["tensorflow", "jax"]

_INSTALL = {"jax": "JAX is not installed: pip install 'distlaunch[jax]', or 'jax[cuda13]' for GPUs"}
"""Backends that are extras."""


def choose_backend(backend: Backend) -> None:
    """Lets Keras run on a backend, once it is imported.

    The strategy decides, and not the user's KERAS_BACKEND or keras.json.

    TensorFlow's lines on settings, of which parameter servers print pages, are left out unless the user has set
    TF_CPP_MIN_LOG_LEVEL. It is read at the import, so it is the same for all: one warm process then serves all
    strategies of a backend.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if missing := missing_backend(backend):
        raise ConfigError(Problem(("strategy", "kind"), f"got '{backend}', but {missing}"))


def ignored_backend(kind: str, backend: Backend, environ: Mapping[str, str]) -> str:
    """Return a line about a KERAS_BACKEND that a strategy overrides; empty if there is none."""
    given = environ.get("KERAS_BACKEND")
    if not given or given == backend:
        return ""
    return f"KERAS_BACKEND={given} is ignored: strategy {kind} runs Keras on {backend}"


def missing_backend(backend: Backend) -> str:
    """What to install, if the backend's package is not there; else an empty string."""
    return _INSTALL[backend] if backend in _INSTALL and importlib.util.find_spec(backend) is None else ""
