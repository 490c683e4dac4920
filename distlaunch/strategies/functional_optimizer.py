"""Lets Keras's optimizers for TensorFlow update values in a stateless scope, as they can on other backends.

They read back what they assign, which DTensor gets wrong; here they get the methods that other backends' have.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

_NEUTRAL = (
    "assign",
    "assign_add",
    "assign_sub",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_backend_update_step",
    "_clip_by_norm",
    "_overwrite_model_variables_with_average_value",
    "_var_key",
)

# between an optimizer's own class, which may call its super's method, and Keras's class for TensorFlow
_Neutral = type("_Neutral", (TFOptimizer,), {name: vars(BaseOptimizer)[name] for name in _NEUTRAL})


def make_functional(optimizer: Any) -> None:
    """Lets a Keras optimizer for TensorFlow update tensors in a stateless scope, as it can on other backends."""
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (cls, _Neutral), {})
    variables = optimizer._trainable_variables
    optimizer._trainable_variables_indices = {id(variable): index for index, variable in enumerate(variables)}
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        make_functional(inner)
