"""Whether lower values of a metric are better, by its name."""

from __future__ import annotations

import pytest

from distlaunch.base.events import EpochEnded
from distlaunch.base.metric_names import falls
from distlaunch.runs.listing import best_values


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            "loss val_loss loss2 mae_1 iou_loss cross_entropy cross-entropy crossentropy val_Brier nll_2 val_wer fp",
            True,
        ),
        ("accuracy val_acc top_5_accuracy f1 f1_score auc_2 true_positives loss_accuracy psnr val_mean_iou tp", False),
        ("m lr entropy score 2 _", None),
    ],
)
def test_the_last_word_that_says_it_counts(names: str, expected: bool | None) -> None:
    assert {name: falls(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


def test_the_learning_rate_in_the_logs_is_no_metric() -> None:
    """Some of Keras's callbacks add it, and then the setting of that name could not be sorted by."""
    rates = [0.1, 0.01]
    ends = [
        EpochEnded(epoch=number, step=number + 1, seconds=1.0, logs={"val_loss": 1.0 - number, "learning_rate": rate})
        for number, rate in enumerate(rates)
    ]
    assert best_values(ends).keys() == {"val_loss"}
