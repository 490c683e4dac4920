"""The task's end of the pipe that ties it to its launcher."""

from __future__ import annotations

import os
import signal
import threading

from distlaunch.base.protocol import LIFELINE_FD


def hold_lifeline() -> None:
    """When the launcher is gone, the pipe ends, and so does this task with everything it started."""
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return
    fd = int(number)
    os.set_inheritable(fd, False)

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
