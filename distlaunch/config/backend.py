"""Selects the backend of Keras in this process, before Keras is imported."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.plain_types import is_dict

Backend = Literal["tensorflow", "jax"]


class Packages(NamedTuple):
    """Packages that pip installs for a backend.

    Attributes:
        name: the name of the framework.
        cuda: the package that brings NVIDIA's libraries along.
        extra: the package for CPUs; empty if distlaunch depends on it.
    """

    name: str
    cuda: str
    extra: str = ""


PACKAGES: dict[Backend, Packages] = {
    "tensorflow": Packages("TensorFlow", "tensorflow[and-cuda]"),
    "jax": Packages("JAX", "jax[cuda13]", "distlaunch[jax]"),
}


def choose_backend(backend: Backend) -> None:
    """Select the backend that Keras will use once it is imported.

    The strategy determines the backend; the user's KERAS_BACKEND and keras.json are ignored.

    TensorFlow's messages about settings are hidden unless the user has set TF_CPP_MIN_LOG_LEVEL, because parameter
    servers would print pages of them. TensorFlow reads this variable at its import. The variable therefore has the same
    value for all strategies, so that one warm process serves all strategies of a backend.

    Raises:
        ConfigError: the backend is not installed.
        UsageError: `keras.json` has a value that makes the imports of TensorFlow and Keras fail.
    """
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if missing := missing_backend(backend):
        raise ConfigError(Problem(("strategy", "kind"), f"got '{backend}', but {missing}"))
    _check_settings()


_SETTINGS = {
    "floatx": ("float16", "float32", "float64"),
    "image_data_format": ("channels_last", "channels_first"),
}


def _check_settings() -> None:
    """Raise UsageError if Keras cannot use its settings; Keras ignores a file that is not valid JSON."""
    path = Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")) / "keras.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not is_dict(settings):
        raise UsageError(f"{path}: expected an object such as {{}}; correct or remove the file")
    for name, allowed in _SETTINGS.items():
        if (got := settings.get(name, allowed[0])) not in allowed:
            raise UsageError(f"{path}: {name}: got {got!r}; expected one of {', '.join(allowed)}; correct the file")
    if not isinstance(got := settings.get("epsilon", 1e-7), float):
        raise UsageError(f"{path}: epsilon: got {got!r}; expected a number such as 1e-07; correct the file")


def ignored_backend(kind: str, backend: Backend, environ: Mapping[str, str]) -> str:
    """Return a line about a KERAS_BACKEND that a strategy overrides, or an empty string."""
    given = environ.get("KERAS_BACKEND")
    if not given or given == backend:
        return ""
    return f"KERAS_BACKEND={given} is ignored: strategy {kind} runs Keras on {backend}"


def missing_backend(backend: Backend) -> str:
    """Return how to install the backend's package if it is missing, or an empty string."""
    packages = PACKAGES[backend]
    if not packages.extra or importlib.util.find_spec(backend) is not None:
        return ""
    return f"{packages.name} is not installed: pip install '{packages.extra}', or '{packages.cuda}' for GPUs"
