"""Words in the names of metrics that show whether lower or higher values are better."""

from __future__ import annotations

import re

_FALLING = frozenset({
    "loss", "error", "mse", "mae", "rmse", "mape", "smape", "mase", "msle", "perplexity", "crossentropy", "bce",
    "nll", "divergence", "kl", "hinge", "poisson", "huber", "logcosh", "cosh", "brier", "wer", "cer", "fid", "false",
    "fp", "fn", "bits", "bpd", "distance", "deviation",
})  # fmt: skip
_RISING = frozenset({
    "acc", "accuracy", "auc", "precision", "recall", "sensitivity", "specificity", "f1", "iou", "similarity", "true",
    "tp", "tn", "psnr", "ssim", "bleu", "rouge", "ndcg", "mrr", "hits", "reward",
})  # fmt: skip
LEARNING_RATE = "learning_rate"
"""The name by which some of Keras's callbacks add the learning rate to an epoch's logs. It is a setting, no metric."""


def falls(metric: str) -> bool | None:
    """Return True if lower values of a metric are better, False if higher ones are, or None if its name does not say.

    The last word that says it counts, as in `iou_loss`.

    Args:
        metric: a name such as `val_loss`. A number that Keras has added (`mae_1`) is ignored.
    """
    name = re.sub(r"cross[\W_]entropy", "crossentropy", metric.lower())
    for word in reversed(re.split(r"[\W_]+", name)):
        # in a name such as `loss2`, the user has added the number
        for each in (word, word.rstrip("0123456789")):
            if each in _FALLING or each in _RISING:
                return each in _FALLING
    return None
