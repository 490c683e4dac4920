"""Handles signals that come before a job starts. It is imported first, so it imports no slow modules."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

RESUMED = ("train", "run")
"""Commands that exit with code 4 when they are stopped, since the same command can then be repeated."""
_STOPPED = 4
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def end_jobs_at_once_on_signals() -> None:
    """Make stop signals end `train` and `run` at once with exit code 4, until the job installs its own handlers."""
    if sys.argv[1:2] and sys.argv[1] in RESUMED:
        for number in _STOP_SIGNALS:
            # a signal that was ignored before (`nohup`) stays ignored
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # do not raise an exception: a module that is being imported may catch it; and nothing needs a cleanup yet
    try:
        os.write(2, f"stopped ({signal.Signals(number).name}); run the same command again\n".encode())
    finally:
        os._exit(_STOPPED)


end_jobs_at_once_on_signals()
