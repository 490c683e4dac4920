"""Words in the names of metrics that show whether lower or higher values are better."""

from __future__ import annotations

_FALLING = frozenset({
    "loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "crossentropy", "divergence", "hinge",
})  # fmt: skip
_RISING = frozenset({"acc", "accuracy", "auc", "precision", "recall", "f1", "iou"})


def falls(metric: str) -> bool | None:
    """Return True if lower values of a metric are better, False if higher ones are, or None if its name does not say.

    Args:
        metric: a name such as `val_loss`. A number that Keras has added (`mae_1`) is ignored.
    """
    words = set(metric.removeprefix("val_").lower().split("_"))
    falling, rising = bool(words & _FALLING), bool(words & _RISING)
    return None if falling == rising else falling
