"""Weights that an optimizer sets at the end of training: the averages of `use_ema`, as in Keras's `fit`.

A checkpoint holds the weights of its last step and the averages, so that training can continue from it. The final
weights are computed from the averages at the end of training, and whenever a finished run is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from distlaunch.patches.keras_private import optimized
from distlaunch.strategies.variables import optimizers_of, with_wrapped_optimizers

_SWAPS, _SWAPPED = "SwapEMAWeights", "_ema_weights_in_model"


def has_final_weights(model: keras.Model) -> bool:
    """Return whether the compiled optimizer changes the weights at the end of training."""
    optimizer = getattr(model, "optimizer", None)
    return (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and optimizer.built
        and any(map(_finalizes, with_wrapped_optimizers(optimizer)))
    )


def set_final_weights(model: keras.Model) -> None:
    """Make the compiled optimizer set the final weights, if it has any. Call this in the strategy's scope."""
    if not has_final_weights(model):
        return
    # the optimizer's own list, because weights that were frozen after it was built have averages too
    model.optimizer.finalize_variable_values(list(optimized(model.optimizer)))


def unused_averages(model: keras.Model) -> list[str]:
    """Return the names of optimizers whose averages never become weights, because they are not the compiled one."""
    others = [optimizer for optimizer in optimizers_of(model) if optimizer is not getattr(model, "optimizer", None)]
    return [optimizer.name for optimizer in others if any(map(_finalizes, with_wrapped_optimizers(optimizer)))]


def keep_swapped_weights(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Let SwapEMAWeights leave the weights of the last step in the optimizer at the end of the last epoch.

    Keras's `fit` needs the averages there, because it sets the weights to them afterwards. A resumed run needs the
    weights: `swap_back` restores them.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            # it replaces the weights after the epoch with this number
            callback.set_params({**(callback.params or {}), "epochs": 0})


def swap_back(callbacks: Iterable[keras.callbacks.Callback], epoch: int) -> None:
    """Let SwapEMAWeights put the weights of the last step back, as it does when another epoch begins."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            callback.on_epoch_begin(epoch)


def validated_with_averages(callbacks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether validation used the averages, although the checkpoint has the weights of the last step.

    Args:
        callbacks: attributes of the callbacks, as stored in a checkpoint.
    """
    swapping = next((each for each in callbacks if each["class"] == _SWAPS), None)
    return swapping is not None and not swapping["changed"].get(_SWAPPED, False)


def _finalizes(part: Any) -> bool:
    overrides = "finalize_variable_values" in vars(type(part)) and not type(part).__module__.startswith("keras.")
    return bool(getattr(part, "use_ema", False)) or overrides
