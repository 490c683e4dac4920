"""Reference runs, shared by all parity tests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.parity.cases import EXACT
from tests.parity.compare import TOLERANCE, allowed


class Reference:
    """One case on one device; the model's own noise is measured only where it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        return self._train()

    @functools.cached_property
    def allowed(self) -> tuple[Any, float]:
        """Largest deviation at each step, and of the final weights."""
        if self._name in EXACT:
            return np.full(len(self.record["steps"]), TOLERANCE), TOLERANCE
        return allowed([self._train(permute=seed) for seed in (1, 2)], self.record)

    def _train(self, **options: Any) -> dict[str, Any]:
        from distlaunch.strategies.one_device import OneDevice
        from tests.parity.train_case import train_case

        return train_case(self._name, OneDevice(), **options)


@pytest.fixture(scope="session")
def one_device(virtual_devices):
    """The reference of a case."""
    return functools.cache(Reference)
