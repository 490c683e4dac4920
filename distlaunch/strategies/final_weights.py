"""The weights that an optimizer leaves at the end of training: the averages of `use_ema`, as Keras's `fit` does.

A checkpoint holds the weights of its last step and the averages. The final weights are made of these, at the end of
training and wherever the model of a finished run is wanted, so that training can continue from what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from distlaunch.patches.keras_private import optimized
from distlaunch.strategies.variables import chain, optimizers_of

_SWAPS, _SWAPPED = "SwapEMAWeights", "_ema_weights_in_model"


def has_final_weights(model: keras.Model) -> bool:
    """Return True if the compiled optimizer changes the weights at the end of training."""
    optimizer = getattr(model, "optimizer", None)
    return (
        isinstance(optimizer, keras.optimizers.Optimizer) and optimizer.built and any(map(_finalizes, chain(optimizer)))
    )


def put_final_weights(model: keras.Model) -> None:
    """Let the compiled optimizer change the weights, if it does; to be called in the strategy's scope."""
    if not has_final_weights(model):
        return
    # its own list: weights that were frozen after it was built have averages, too
    model.optimizer.finalize_variable_values(list(optimized(model.optimizer)))


def unused_averages(model: keras.Model) -> list[str]:
    """Return names of optimizers beside the compiled one whose averages nothing puts into the weights."""
    others = [optimizer for optimizer in optimizers_of(model) if optimizer is not getattr(model, "optimizer", None)]
    return [optimizer.name for optimizer in others if any(map(_finalizes, chain(optimizer)))]


def judged_by_averages(callbacks: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if validation judged the averages, and the checkpoint has the weights of the last step.

    Args:
        callbacks: their plain attributes, as a checkpoint has them.
    """
    swapping = next((one for one in callbacks if one["class"] == _SWAPS), None)
    return swapping is not None and not swapping["changed"].get(_SWAPPED, False)


def _finalizes(part: Any) -> bool:
    overrides = "finalize_variable_values" in vars(type(part)) and not type(part).__module__.startswith("keras.")
    return bool(getattr(part, "use_ema", False)) or overrides
