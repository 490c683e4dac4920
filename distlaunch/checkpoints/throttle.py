"""Throttling of work beside training, which needs the same memory, disk and cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHARE = 0.06
"""Share of a core's time for each thread that works; half as many threads as cores do. Two busy cores lose what it
takes: their steps took 1.3 times as long beside 1 GB that was written at full speed, and 1.03 to 1.12 at shares of 0.07
to 0.2."""


class Throttle:
    """Makes a thread rest after each piece of work, until somebody waits for the work.

    Args:
        is_urgent: asked before each rest.
    """

    def __init__(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._is_urgent = is_urgent
        self._released = threading.Event()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Work on one piece, in any thread."""
        # processor time only: while the disk is waited for, nothing is taken from training
        began = time.thread_time()
        yield
        if not self._is_urgent():
            self._released.wait((time.thread_time() - began) * (1 / _SHARE - 1))

    def release(self) -> None:
        """End the rest of this moment, and rest no more."""
        self._released.set()


FULL_SPEED = Throttle()
"""Never rests."""
FULL_SPEED.release()
