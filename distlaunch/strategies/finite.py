"""Whether what a step has computed is finite: its losses, or the weights that it leaves."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

_SMALL = 4096
"""Elements of a variable that is looked at after each step."""


def loss_probe(logs: Any) -> Any:
    """A float32 scalar that is finite if, and only if, all losses among the scalars of a step are.

    What is called so counts as one; the running mean of an epoch, too, which is not finite from the first such loss on.
    """
    named = logs.items() if isinstance(logs, Mapping) else ()
    total: Any = ops.convert_to_tensor(0.0, "float32")
    for name, value in named:
        if "loss" in name and value is not None:
            # small: a sum of finite numbers must not become infinite
            mean: Any = ops.mean(ops.cast(value, "float32"))
            total = total + mean * 1e-6
    return total


def losses_are_finite(logs: Any) -> tf.Tensor:
    """The same as a bool scalar of TensorFlow."""
    return tf.math.is_finite(loss_probe(logs))


@tf.autograph.experimental.do_not_convert
def weights_are_finite(variables: Sequence[Any]) -> tf.Tensor:
    """Whether the small ones of some weights are, or the smallest one: where a gradient is not, hardly any stays so."""
    floats = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    by_size = sorted(floats, key=lambda variable: int(np.prod(variable.shape)))
    chosen = [v for v in by_size if int(np.prod(v.shape)) <= _SMALL] or by_size[:1]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(variable.value)) for variable in chosen])
