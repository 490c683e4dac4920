"""Words in the names of metrics that show whether lower or higher values are better."""

from __future__ import annotations

import re

_FALLING = frozenset({
    "loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "crossentropy", "divergence", "hinge",
    "poisson", "huber", "logcosh", "cosh", "false",
})  # fmt: skip
_RISING = frozenset({
    "acc", "accuracy", "auc", "precision", "recall", "sensitivity", "specificity", "f1", "iou", "similarity", "true",
})  # fmt: skip


def falls(metric: str) -> bool | None:
    """Return True if lower values of a metric are better, False if higher ones are, or None if its name does not say.

    The last word that says it counts, as in `iou_loss`.

    Args:
        metric: a name such as `val_loss`. A number that Keras has added (`mae_1`) is ignored.
    """
    for word in reversed(re.split(r"[\W_]+", metric.lower())):
        if word in _FALLING or word in _RISING:
            return word in _FALLING
    return None
