"""Finds models whose state JAX would keep in another way than TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import listed
from distlaunch.strategies.variables import untracked_variables


def check_state_on_jax(model: keras.Model, warn: Callable[[str], None]) -> None:
    """Check the variables of a model that JAX will train.

    Args:
        warn: called with warnings.

    Raises:
        ConfigError: a variable has 64 bits, which JAX reduces to 32.
    """
    import jax

    wide = next((one for one in model.variables if str(one.dtype) == "float64"), None)
    if wide is not None and not jax.config.read("jax_enable_x64"):
        message = f"got 'jax', but {wide.path} has the type float64, and JAX computes with 32 bits"
        hint = "use another strategy, make the model float32, or set JAX_ENABLE_X64=1"
        raise ConfigError(Problem(("strategy", "kind"), f"{message}; {hint}"))
    if names := [name.partition("/")[2] for name in untracked_variables(model)]:
        what = f"the variables {listed(names)} belong to no layer, metric or optimizer of the model"
        effect = "JAX keeps the values that they have when a step is compiled, and drops what a step assigns to them"
        warn(f"{what}; {effect}; make them weights of a layer, or use another strategy")
