"""Keras's dtype policy from the config, in effect while a model is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import current_dtype_policy, is_functional, layers_of, put_dtype_policy
from distlaunch.strategies.module_model import ModuleModel


@contextlib.contextmanager
def dtype_policy_scope(name: str | None = None) -> Iterator[None]:
    """Set the dtype policy of layers and models that are made in this context, and restore it afterwards.

    The policy is not set for the whole process, because data and preprocessing functions may create layers too.

    Args:
        name: the policy; None to keep the current one.
    """
    # this sets no default; Keras's getter would fix float32 before the model's function can set another floatx
    before = current_dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        put_dtype_policy(before)


def check_precision(name: str | None, model: keras.Model) -> None:
    """Raise ConfigError if the config's policy has no effect on the model."""
    if name is None:
        return
    if isinstance(model, ModuleModel) and name != "float32":
        message = f"got '{name}', but the code of a tf.Module determines its dtypes; remove this key"
        raise ConfigError(Problem(("precision",), message))
    # the policy of a Sequential or functional model does not tell which policies its layers have
    own = [layer for layer in layers_of(model) if not isinstance(layer, keras.Sequential) and not is_functional(layer)]
    found = {layer.dtype_policy.name for layer in own if layer.variables}
    if found and name not in found:
        message = f"got '{name}', but the model's function sets {' and '.join(sorted(found))} for its layers"
        raise ConfigError(Problem(("precision",), f"{message}; remove this key, or the dtype in the function"))
