"""How values add up over replicas follows from those for all rows and for two parts of the rows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.strategies.replica.share import Reduction
from distlaunch.strategies.replica.trial import Observed

ROWS = np.array([1.0, 4.0, 9.0, 2.0, 7.0], np.float32)
PARTS = ROWS[:2], ROWS[2:]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.mean, Reduction.MEAN),
        (np.sum, Reduction.SUM),
        (lambda rows: np.sqrt(np.mean(rows)), Reduction.WHOLE),
        (np.max, Reduction.WHOLE),
        (lambda rows: rows, Reduction.MEAN),
        (np.sort, Reduction.WHOLE),
        (lambda rows: 0.0 * rows[0], None),
    ],
    ids=["mean", "sum", "root", "largest", "one value per row", "sorted rows", "zeros"],
)
def test_reduction(value: object, expected: Reduction | None) -> None:
    assert callable(value)
    values = [np.asarray(value(rows)) for rows in (ROWS, *PARTS)]
    observed = Observed({("loss", "0"): values}, {}, {}, np.array([0.4, 0.6]))
    assert observed.reduction_of(("loss", "0")) is expected
