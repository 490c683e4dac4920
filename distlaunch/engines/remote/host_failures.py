"""Failures of hosts during a job: a restart leaves out hosts that have failed twice."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 2
"""Number of failures after which a host is left out; a single one may be an accident."""


class HostFailures:
    """Counts failures of hosts, at most one per host and attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: dict[str, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, host: str, attempt: int) -> None:
        """Record that in this attempt a host was lost, or a task on it was killed or froze."""
        self._at.setdefault(host, {})[attempt] = self._clock()

    def count(self, host: str, window_s: float | None = None) -> int:
        """Return the number of attempts within the last `window_s` seconds in which a host has failed."""
        now = self._clock()
        return sum(window_s is None or now - at <= window_s for at in self._at.get(host, {}).values())
