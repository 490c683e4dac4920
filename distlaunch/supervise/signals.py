"""Signals to the launcher, as data to read in its loop instead of code that runs anywhere."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)


class SignalPipe:
    """While entered, signals make `fd` readable and are read from it. To be used in the main thread.

    A signal that was ignored before (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def read(self) -> list[signal.Signals]:
        """The signals since the last call, in order; never waits."""
        try:
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalPipe:
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _TAKEN:
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The number has already been written to the pipe."""
