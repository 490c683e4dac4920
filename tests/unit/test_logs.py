"""Values of steps on the host."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

from distlaunch.strategies.variables import logs_to_host


def test_the_loss_comes_first_and_the_others_keep_their_order() -> None:
    assert list(logs_to_host({"b": 1.0, "a": 2.0, "loss": 3.0})) == ["loss", "b", "a"]
    assert np.array_equal(logs_to_host({"each": [1.0, 2.0]})["each"], [1.0, 2.0])
