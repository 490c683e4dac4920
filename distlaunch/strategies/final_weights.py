"""The weights that an optimizer sets at the end of training: the averages of `use_ema`, as in Keras's `fit`.

A checkpoint holds the weights of its last step and the averages. The final weights are computed from these at the end
of training, and for each use of a finished run, so that training can continue from the weights of the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from distlaunch.patches.keras_private import optimized
from distlaunch.strategies.variables import chain, optimizers_of

_SWAPS, _SWAPPED = "SwapEMAWeights", "_ema_weights_in_model"


def has_final_weights(model: keras.Model) -> bool:
    """Return whether the compiled optimizer changes the weights at the end of training."""
    optimizer = getattr(model, "optimizer", None)
    return (
        isinstance(optimizer, keras.optimizers.Optimizer) and optimizer.built and any(map(_finalizes, chain(optimizer)))
    )


def put_final_weights(model: keras.Model) -> None:
    """Make the compiled optimizer set the final weights, if it does so. Call it in the strategy's scope."""
    if not has_final_weights(model):
        return
    # the optimizer's list: weights that were frozen after it was built have averages, too
    model.optimizer.finalize_variable_values(list(optimized(model.optimizer)))


def unused_averages(model: keras.Model) -> list[str]:
    """Return the names of optimizers, other than the compiled one, whose averages never become weights."""
    others = [optimizer for optimizer in optimizers_of(model) if optimizer is not getattr(model, "optimizer", None)]
    return [optimizer.name for optimizer in others if any(map(_finalizes, chain(optimizer)))]


def judged_by_averages(callbacks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether validation used the averages while the checkpoint has the weights of the last step.

    Args:
        callbacks: their plain attributes, as stored in a checkpoint.
    """
    swapping = next((one for one in callbacks if one["class"] == _SWAPS), None)
    return swapping is not None and not swapping["changed"].get(_SWAPPED, False)


def _finalizes(part: Any) -> bool:
    overrides = "finalize_variable_values" in vars(type(part)) and not type(part).__module__.startswith("keras.")
    return bool(getattr(part, "use_ema", False)) or overrides
