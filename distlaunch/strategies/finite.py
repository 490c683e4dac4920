"""Tests whether the losses of a step, or the weights after it, are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from distlaunch.patches.tensorflow_late import not_converted, tf

_SMALL = 4096
"""Largest number of elements of a variable that is checked after each step."""


def loss_probe(logs: Any) -> Any:
    """Return a float32 scalar that is finite if, and only if, all losses among a step's scalars are.

    A scalar with `loss` in its name counts as a loss. It may be a running mean, which is not finite after the first
    loss that is not finite.
    """
    named = logs.items() if isinstance(logs, Mapping) else ()
    total: Any = ops.convert_to_tensor(0.0, "float32")
    for name, value in named:
        if "loss" in name and value is not None:
            # scaled down, so that a sum of finite numbers does not become infinite
            mean: Any = ops.mean(ops.cast(value, "float32"))
            total = total + mean * 1e-6
    return total


def losses_are_finite(logs: Any) -> tf.Tensor:
    """Return whether all losses are finite, as a TensorFlow bool scalar; see `loss_probe`."""
    return tf.math.is_finite(loss_probe(logs))


@not_converted
def weights_are_finite(variables: Sequence[Any]) -> tf.Tensor:
    """Return whether the small variables, or the smallest one if none is small, are finite; a bool scalar.

    Large variables are skipped, because a gradient that is not finite spreads to nearly all weights.
    """
    floats = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    by_size = sorted(floats, key=lambda variable: int(np.prod(variable.shape)))
    chosen = [v for v in by_size if int(np.prod(v.shape)) <= _SMALL] or by_size[:1]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(variable.value)) for variable in chosen])
