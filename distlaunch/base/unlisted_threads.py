"""Threads that `threading` does not list, so that a program that joins all listed threads does not wait forever."""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable

_started = 0


def start_unlisted(function: Callable[[], object]) -> None:
    """Start a thread that runs a function until the process ends."""
    global _started
    _thread.start_new_thread(function, ())
    _started += 1


def num_unlisted() -> int:
    """Return the number of threads that `start_unlisted` has started in this process."""
    return _started


def _forget() -> None:
    """Count from 0 in a forked process, which has only the thread that forked."""
    global _started
    _started = 0


os.register_at_fork(after_in_child=_forget)
