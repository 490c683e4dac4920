"""The pace of work beside training, which needs the same memory, disk and cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHARE = 0.06
"""Of a core's time, for each thread that works; half as many threads as cores do. Two busy cores lose what it takes:
their steps took 1.3 times as long beside 1 GB that was written at full speed, and 1.03 to 1.12 at shares of 0.07 to
0.2."""


class Pace:
    """Has a thread rest after each piece of work, until somebody waits for the work.

    Args:
        is_urgent: asked before each rest.
    """

    def __init__(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._is_urgent = is_urgent
        self._hurried = threading.Event()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Works on one piece, in any thread."""
        # of the processor only: while the disk is waited for, nothing is taken from training
        began = time.thread_time()
        yield
        if not self._is_urgent():
            self._hurried.wait((time.thread_time() - began) * (1 / _SHARE - 1))

    def hurry(self) -> None:
        """From now on there are no rests, and the one of this moment is over."""
        self._hurried.set()


FULL_SPEED = Pace()
"""Without rests."""
FULL_SPEED.hurry()
