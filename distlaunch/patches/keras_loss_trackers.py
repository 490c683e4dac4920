"""Makes a functional step average the losses of single outputs over batches, as Keras does on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from distlaunch.patches.keras_private import compiled_loss
from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(Symbol("keras.metrics.Mean.update_state", "(self, values, sample_weight=None)"),),
    why="On TensorFlow, Keras does not know a batch's number of rows when it tracks these losses, so it averages them "
    "over batches. In a functional step, it knows the number of rows and would weight the losses by it.",
    until="Keras weights these losses by rows on every backend, or on none.",
)


def average_over_batches(model: keras.Model) -> None:
    """Give each batch the same weight in the tracked losses of the model's single outputs."""
    PATCH.check()
    # a model with one output, or without a compiled loss, has none
    for tracker in getattr(compiled_loss(model), "metrics", ()):
        tracker.update_state = functools.partial(_unweighted, tracker.update_state)


def _unweighted(update_state: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
    return update_state(values)
