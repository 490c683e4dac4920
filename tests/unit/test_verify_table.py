"""The table that `verify` prints."""

from __future__ import annotations

import pytest

from distlaunch.base.judge import Judgement
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import OneDeviceSection
from distlaunch.ui.verify import table_lines
from distlaunch.verify.comparison import EQUAL, Row, VerifyResult
from distlaunch.verify.trials import PlannedTrial

STEPS = 30


@pytest.mark.parametrize(
    ("sharp_to", "expected"),
    [
        ([STEPS], "All compared trials (1) give one device's numbers."),
        ([8], "numbers, which is proven up to step 8 of 30; noise hides later deviations."),
        ([STEPS, 8], "numbers, which is proven up to step 8 of 30; noise hides later deviations."),
        ([STEPS, 0], "All compared trials (2) give one device's numbers, which is not proven for 1 of them: noise"),
        ([0], "numbers, which is not proven for any of them: noise hides all steps."),
    ],
)
def test_the_last_line_says_up_to_which_step_it_is_proven(sharp_to: list[int], expected: str) -> None:
    config = RunConfig.model_construct(strategy=OneDeviceSection(kind="one_device"))
    planned = PlannedTrial("one_device", 1, 1, config)
    rows = [Row(planned, EQUAL, judgement=Judgement(None, 0.0, 0.0, 0.0, sharp_to=step)) for step in sharp_to]
    assert expected in table_lines(VerifyResult(STEPS, rows))[-1]
