"""Reference runs, shared by all parity tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.compare import allowed


@pytest.fixture(scope="session")
def one_device(virtual_devices):
    """Reference and noise runs of a case, each trained once."""
    from distlaunch.strategies.one_device import OneDevice
    from tests.parity.train_case import train_case

    cache: dict[str, Any] = {}

    def runs(name: str) -> tuple[dict, tuple]:
        if name not in cache:
            reference = train_case(name, OneDevice())
            noise = [train_case(name, OneDevice(), permute=seed) for seed in (1, 2)]
            cache[name] = reference, allowed(noise, reference)
        return cache[name]

    return runs
