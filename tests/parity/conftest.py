"""Reference runs, shared by all parity tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parity.compare import allowed


class Reference:
    """One case on one device; the model's own noise is measured only where it is asked for."""

    def __init__(self, case: str | dict[str, Any]) -> None:
        self._case = case

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        return self._train()

    @functools.cached_property
    def allowed(self) -> tuple[Any, float]:
        """Largest deviation at each step, and of the final weights."""
        # as `verify`: permuting alone never moves an activation over the kink of a ReLU
        runs = [self._train(**{kind: seed}) for kind in ("permute", "rounded") for seed in (1, 2)]
        return allowed(runs, self.record)

    def _train(self, **options: Any) -> dict[str, Any]:
        from distlaunch.strategies.one_device import OneDevice
        from tests.parity.train_case import train_case

        return train_case(self._case, OneDevice(), **options)


@pytest.fixture(scope="session")
def one_device(virtual_devices):
    """The reference of a case."""
    return functools.cache(Reference)
