"""BatchNormalization on replicas. Keras's layers use the statistics of each replica's rows, unless they synchronize."""

from __future__ import annotations

from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import layers_of


def replica_batch_norms(model: keras.Model) -> list[str]:
    """Return the names of Keras layers that normalize with the rows of their replica."""
    return [layer.name for layer in layers_of(model) if _normalizes_per_replica(layer)]


def synchronize_batch_norm(model: keras.Model) -> None:
    """Make BatchNormalization use the statistics of the whole batch. Call it before a step is traced."""
    for layer in filter(_normalizes_per_replica, layers_of(model)):
        layer.synchronized = True


def check_batch_norm(model: keras.Model) -> None:
    """Raise ConfigError if a model has no layer that the setting `synchronize_batch_norm` could change."""
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers_of(model)):
        message = "got true, but the model has no keras.layers.BatchNormalization; remove this key"
        raise ConfigError(Problem(("synchronize_batch_norm",), message))


def _normalizes_per_replica(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable
