"""The task's end of the pipe that ties it to its launcher."""

from __future__ import annotations

import _thread
import os
import signal

from distlaunch.base.protocol import LIFELINE_FD


def hold_lifeline() -> bool:
    """Kill this task and everything it started when the pipe ends, which means that the launcher is gone.

    Returns:
        Whether there is a pipe. A thread then waits for its end.
    """
    # removed from the environment, so that processes started by the task do not use it
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return False
    fd = int(number)
    # and do not inherit it either
    os.set_inheritable(fd, False)

    def wait() -> None:
        # nothing is ever written: `read` returns at end of file
        while os.read(fd, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    # not `threading`: a program that joins all of its threads would wait for this one forever
    _thread.start_new_thread(wait, ())
    return True
