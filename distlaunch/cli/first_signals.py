"""Signals that come before there is a job. It imports nothing slow: each instant counts."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

RESUMED = ("train", "run")
"""Commands that end with exit code 4 when they are stopped, and are run again then."""
_STOPPED = 4
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def end_at_once_if_asked() -> None:
    """Make signals end `train` and `run` with the exit code for that, until the job takes them over."""
    if sys.argv[1:2] and sys.argv[1] in RESUMED:
        for number in _ENDING:
            # a signal that was ignored before (`nohup`) stays ignored
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # an exception would be lost in what is being imported; nothing was started that needs an end
    try:
        os.write(2, f"stopped ({signal.Signals(number).name}); run the same command again\n".encode())
    finally:
        os._exit(_STOPPED)


end_at_once_if_asked()
