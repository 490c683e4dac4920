"""The engine without processes, which the tests of supervision use, keeps the contract of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distlaunch.testing.engines import Attempt, EngineConformance
from tests.unit.memory_engine import MemoryEngine, PlayedAllocation


class TestMemory(EngineConformance):
    slots = 4
    has_processes = False
    has_listeners = False

    def make(self, folder: Path) -> Any:
        return MemoryEngine(folder)

    def lose_host(self, attempt: Attempt, host: str) -> None:
        assert isinstance(attempt.allocation, PlayedAllocation)
        attempt.allocation.lose(host)
