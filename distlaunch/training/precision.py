"""Keras's dtype policy, from the config, for as long as a model is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import current_dtype_policy, is_functional, layers_of, put_dtype_policy
from distlaunch.strategies.module_model import ModuleModel


@contextlib.contextmanager
def policy(name: str | None = None) -> Iterator[None]:
    """Within it, layers and models get this policy; None: the one there is. What is set within it ends with it.

    Not for the whole process: what the data and preprocessing functions make stays as it is.
    """
    before = current_dtype_policy()  # asking Keras would fix float32 before a model's function may set another floatx
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        put_dtype_policy(before)


def check_precision(name: str | None, model: keras.Model) -> None:
    """Raises ConfigError where the model did not take the policy."""
    if name is None:
        return
    if isinstance(model, ModuleModel) and name != "float32":
        message = f"got '{name}', but a tf.Module computes in the types that it was written with; remove it"
        raise ConfigError(Problem(("precision",), message))
    # Sequential and functional models compute nothing themselves, and take the policy whatever their layers have
    own = [layer for layer in layers_of(model) if not isinstance(layer, keras.Sequential) and not is_functional(layer)]
    found = {layer.dtype_policy.name for layer in own if layer.variables}
    if found and name not in found:
        message = f"got '{name}', but the model's function gives its layers {' and '.join(sorted(found))}"
        raise ConfigError(Problem(("precision",), f"{message}; remove it, or do not name a dtype there"))
