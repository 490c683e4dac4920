"""Weights that are not finite are found before they are saved; other values may be infinite or NaN on purpose."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distlaunch.base.errors import NonFiniteError
from distlaunch.base.events import Event, Notice
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.writers import nonfinite_name
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.protocol import CallResult
from distlaunch.training.checks.nonfinite import NonFinite

BAD = np.array([1.0, np.inf], ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("state", "fails"),
    [
        ({"model/kernel": BAD}, True),
        ({"optimizer/momentum": np.array(np.nan)}, True),
        ({"model/smallest": np.array(np.inf), "model/kernel": np.ones(2)}, False),
        ({"model/kernel": np.array([1, 2]), "metric/best": np.array(np.inf)}, False),
    ],
)
def test_a_state_that_is_to_be_saved(state: dict[str, np.ndarray], fails: bool) -> None:
    name = nonfinite_name(state, {"model/kernel", "optimizer/momentum"})
    assert (name is not None) == fails
    if name is not None:
        with pytest.raises(NonFiniteError, match=r"is not finite after step 1,250.*on_nonfinite: warn"):
            NonFinite("fail", _nobody).state(name, 1250)


def test_a_warning_is_told_once() -> None:
    told: list[Event] = []
    found = NonFinite("warn", told.append)
    for step in (1, 2):
        found.state("model/kernel", step)
        found.metrics({"accuracy": float("nan"), "loss": 0.5}, step)
    messages = [event.message for event in told if isinstance(event, Notice)]
    assert messages == [
        "'model/kernel' is not finite after step 1; training continues (train.on_nonfinite: warn)",
        "accuracy is nan in epoch 2",
    ]


@pytest.mark.parametrize(
    ("before", "restored", "logs", "hint"),
    [
        (0, 0, {"loss": float("nan")}, "the initial weights give this on the first batch"),
        (0, 0, {"loss": 2.0}, "a smaller learning rate"),  # a weight is not finite after the step
        (7, 0, {"loss": float("inf")}, "a smaller learning rate"),
        (7, 7, {"loss": float("nan")}, "training had already diverged"),
    ],
)
def test_the_hint_fits_the_step(before: int, restored: int, logs: dict[str, float], hint: str) -> None:
    result = CallResult(steps=1, ended=False, logs=logs, vote=Vote(), nonfinite=1)
    with pytest.raises(NonFiniteError, match=f"in step {before + 1}, .*{hint}"):
        NonFinite("fail", _nobody).step(result, Progress(step=before), restored_step=restored)


def _nobody(event: Event) -> None:
    pytest.fail(f"nothing is to be told: {event}")
