"""Keras's dtype policy, from the config, for as long as a model is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
from keras.src.backend.common import global_state as keras_state
from keras.src.models.functional import Functional

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.strategies.module_model import ModuleModel


@contextlib.contextmanager
def policy(name: str | None = None) -> Iterator[None]:
    """Within it, layers and models get this policy; None: the one there is. What is set within it ends with it.

    Not for the whole process: what the data and preprocessing functions make stays as it is.
    """
    # not keras.config.dtype_policy(), which fixes float32 before a model's function may set another floatx
    before = keras_state.get_global_attribute("dtype_policy")
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras_state.set_global_attribute("dtype_policy", before)


def check_precision(name: str | None, model: keras.Model) -> None:
    """Raises ConfigError where the model did not take the policy."""
    if name is None:
        return
    if isinstance(model, ModuleModel) and name != "float32":
        message = f"got '{name}', but a tf.Module computes in the types that it was written with; remove it"
        raise ConfigError(Problem(("precision",), message))
    # Sequential and functional models compute nothing themselves, and take the policy whatever their layers have
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Sequential | Functional)]
    found = {layer.dtype_policy.name for layer in layers if layer.variables}
    if found and name not in found:
        message = f"got '{name}', but the model's function gives its layers {' and '.join(sorted(found))}"
        raise ConfigError(Problem(("precision",), f"{message}; remove it, or do not name a dtype there"))
