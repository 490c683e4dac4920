"""Throttles background work, which competes with training for memory, disk and cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHARE = 0.06
"""Fraction of a core's time that each thread uses; there are half as many threads as cores.

With two busy cores, steps took 1.3 times as long while 1 GB was written at full speed, and 1.03 to 1.12 times as long
with fractions of 0.07 to 0.2.
"""


class Throttle:
    """Makes a thread pause after each piece of work, as long as no other thread waits for the result.

    Args:
        is_urgent: called before each pause, which is skipped if the function returns True.
    """

    def __init__(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._is_urgent = is_urgent
        self._released = threading.Event()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Return a context for one piece of work, followed by a pause; for any thread."""
        # only CPU time counts, because waiting for the disk does not slow down training
        began = time.thread_time()
        yield
        if not self._is_urgent():
            self._released.wait((time.thread_time() - began) * (1 / _SHARE - 1))

    def release(self) -> None:
        """End the current pause, and make no further pauses."""
        self._released.set()


FULL_SPEED = Throttle()
"""Throttle without pauses."""
FULL_SPEED.release()
