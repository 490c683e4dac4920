"""BatchNormalization on replicas. Keras's layers use the statistics of each replica's rows, unless they synchronize."""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import layers_of, other_list
from distlaunch.patches.tensorflow_late import tf


def replica_batch_norms(model: keras.Model) -> list[str]:
    """Return the names of Keras layers that normalize with the rows of their replica."""
    return [layer.name for layer in layers_of(model) if _normalizes_per_replica(layer)]


def synchronize_batch_norm(model: keras.Model) -> None:
    """Make BatchNormalization use the statistics of the whole batch. Call it before a step is traced."""
    for layer in filter(_normalizes_per_replica, layers_of(model)):
        layer.synchronized = True


def normalize_in_parts(model: keras.Model, rows: Sequence[int]) -> None:
    """Make the layers of `replica_batch_norms` compute on one device what they compute on replicas.

    Each part of a batch is normalized with its own statistics, and the moving averages are those of the first part. If
    that part is empty, they do not change. With `renorm=True`, this holds for the first step only, because in later
    steps each replica uses moving averages of its own.

    Args:
        rows: number of rows of each replica. If a layer's input has another number, such as rows times steps of
            `TimeDistributed`, its parts have the same proportions.
    """
    bounds = [0, *itertools.accumulate(rows)]

    def call_in_parts(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        call = type(self).call
        if not training:
            return call(self, inputs, training=training, mask=mask)
        per_row = tf.shape(inputs)[0] // bounds[-1]
        averages = list(other_list(self))
        before = [tf.identity(variable.value) for variable in averages]
        found, kept = [], []
        for start, stop in itertools.pairwise(bounds):
            if start == stop:
                kept = kept or before
                continue
            for variable, value in zip(averages, before, strict=True):
                variable.assign(value)  # the part before has changed them
            own = slice(start * per_row, stop * per_row)
            found.append(call(self, inputs[own], training=True, mask=None if mask is None else mask[own]))
            kept = kept or [tf.identity(variable.value) for variable in averages]
        for variable, value in zip(averages, kept, strict=True):
            variable.assign(value)
        return tf.concat(found, 0)

    for layer in filter(_normalizes_per_replica, layers_of(model)):
        object.__setattr__(layer, "call", types.MethodType(call_in_parts, layer))


def check_batch_norm(model: keras.Model) -> None:
    """Raise ConfigError if a model has no layer that the setting `synchronize_batch_norm` could change."""
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers_of(model)):
        message = "got true, but the model has no keras.layers.BatchNormalization; remove this key"
        raise ConfigError(Problem(("synchronize_batch_norm",), message))


def _normalizes_per_replica(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable
