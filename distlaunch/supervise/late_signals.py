"""Stop signals that come after the end of a job, while its values, page and result are still being reported."""

from __future__ import annotations

import os
import signal
from types import FrameType

from distlaunch.base.signals import JOB_STOP_SIGNALS

_ENDS_WAITS = 2
_ENDS_PROCESS = 3


class LateSignals:
    """Keeps stop signals from changing the result of a job that has ended.

    `SignalPipe` calls `take_over` at the end of a job. From then on, the first signal does nothing, the second shortens
    the wait for trackers and for a blocked output, and the third ends the process with the exit code of the job.

    Attributes:
        exit_code: exit code of the job; None until it is known.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._num_received = 0

    def take_over(self) -> None:
        """Handle the stop signals from now on, except those that are ignored (`nohup`)."""
        for number in JOB_STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def end_waits(self) -> bool:
        """Return True if the user does not want to wait any longer."""
        return self._num_received >= _ENDS_WAITS

    def exit(self) -> None:
        """End the process without waiting for blocked outputs, if the exit code of the job is known."""
        if self.exit_code is not None:
            os._exit(self.exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._num_received += 1
        if self._num_received == 1:
            os.write(2, f"the job has already ended; its result follows ({signal.Signals(number).name})\n".encode())
        elif self._num_received >= _ENDS_PROCESS:
            self.exit()
