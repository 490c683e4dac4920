"""The task's end of the pipe that ties it to its launcher."""

from __future__ import annotations

import os
import signal

from distlaunch.base.protocol import LIFELINE_FD
from distlaunch.base.unlisted_threads import start_unlisted


def hold_lifeline() -> None:
    """Kill this task and everything it started when the pipe ends, which means that the launcher is gone."""
    # removed from the environment, so that processes started by the task do not use it
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return
    fd = int(number)
    # processes started by the task must not inherit it either
    os.set_inheritable(fd, False)

    def wait() -> None:
        # nothing is ever written: `read` returns at end of file
        while os.read(fd, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    start_unlisted(wait)
