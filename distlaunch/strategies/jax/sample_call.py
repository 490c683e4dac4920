"""Calls a model on a few rows before training, as one compiled function.

Outside of a compiled function, JAX compiles every operation by itself, once for each shape. For a model with many
layers, this takes longer than compiling the whole model.
"""

from __future__ import annotations

from typing import Any

import jax
import keras

# the function runs once, so that it need not be fast
_COMPILER_OPTIONS: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def predict_compiled(model: keras.Model, x: Any) -> Any:
    """Return the predictions with `training=False`, without changing variables.

    Args:
        model: a model whose variables exist.
        x: inputs of a few rows, as NumPy arrays.

    Raises:
        Exception: any error of the model, also one that only occurs because the model is traced.
    """

    def call(trainable: Any, others: Any, x: Any) -> Any:
        return model.stateless_call(trainable, others, x, training=False)[0]

    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    return jax.jit(call, compiler_options=_COMPILER_OPTIONS)(trainable, others, x)
