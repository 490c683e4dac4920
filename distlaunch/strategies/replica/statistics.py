"""What layers count of the batches they see, such as the moving averages of BatchNormalization: each replica its own.

A checkpoint has those of the first replica, so an evaluation within training takes them too: else it would judge a
model that is never saved, and another one after a restart.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from distlaunch.patches.keras_private import layers_of, other_list


class Statistics:
    """Those of a model under a `tf.distribute.Strategy`."""

    def __init__(self, strategy: Any, model: keras.Model) -> None:
        self._strategy, self._model = strategy, model
        self._call = tf.function(lambda: strategy.run(self._take_first), autograph=False)

    @functools.cached_property
    def _variables(self) -> list[Any]:
        # a layer that is frozen counts nothing, and may be large
        found = [variable for layer in layers_of(self._model) if layer.trainable for variable in other_list(layer)]
        floats = (variable for variable in found if keras.backend.is_float_dtype(variable.dtype))
        return list({id(variable): variable for variable in floats}.values())

    def take_first(self) -> None:
        """Gives all replicas those of the first; every process must call it."""
        if self._variables and self._strategy.num_replicas_in_sync > 1:
            self._call()

    def _take_first(self) -> None:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        values = [tf.convert_to_tensor(variable.value) for variable in self._variables]
        # the others add zeros, whatever they have: exactly the value of the first comes out
        parts = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
        for variable, value in zip(self._variables, context.all_reduce(tf.distribute.ReduceOp.SUM, parts), strict=True):
            variable.assign(value)
