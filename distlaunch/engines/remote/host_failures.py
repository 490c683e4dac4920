"""Which hosts have failed during a job, and when: a restart leaves out those that failed twice."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 2
"""One failure may be bad luck of any host."""


class HostFailures:
    """Counts at most one failure of a host in each attempt, however many signs of it there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: dict[str, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, host: str, attempt: int) -> None:
        """A host was lost, or a task on it was killed or froze, in an attempt of this number."""
        self._at.setdefault(host, {})[attempt] = self._clock()

    def count(self, host: str, window_s: float | None = None) -> int:
        """In how many attempts a host has failed, of those within the last `window_s` seconds."""
        now = self._clock()
        return sum(window_s is None or now - at <= window_s for at in self._at.get(host, {}).values())
