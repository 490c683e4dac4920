"""The end of a task's process: the user's exit hooks run, for a limited time; those of the frameworks do not."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from typing import NoReturn

HOOKS_S = 3.0
"""Time in seconds for all exit hooks: less than a launcher waits for a task that has nothing to save."""


class ProcessEnd:
    """Ends this process with an exit code that nothing can change or delay.

    Python itself waits for threads that are not daemons. At exit, TensorFlow and JAX wait for peers that may have
    ended; JAX itself ends the process if a peer has ended.
    """

    def __init__(self) -> None:
        self._code: int | None = None

    def skip_earlier_hooks(self) -> None:
        """Skip the exit hooks that were registered before this call, except Python's own.

        Call it after the frameworks are imported, and before the user's code is. Exit hooks run in reverse order, so
        the earlier ones are never reached. Python's own are registered again.
        """
        atexit.register(self._leave)
        # buffered logs and temporary directories
        for own in (logging.shutdown, weakref.finalize._exitfunc):  # pyright: ignore[reportAttributeAccessIssue]
            atexit.unregister(own)
            atexit.register(own)

    def __call__(self, code: int) -> None:
        """Run the exit hooks and end the process. Return only in a signal handler that interrupts an earlier call."""
        if self._code is not None:
            return
        # first: a second call, from a signal handler, returns at once
        self._code = code
        _flush()
        watchdog = threading.Timer(HOOKS_S, self._cut_short)
        # this process must not wait for it
        watchdog.daemon = True
        watchdog.start()
        atexit._run_exitfuncs()  # prints the errors of a hook, and continues with the next
        self._exit()

    def _leave(self) -> None:
        if self._code is not None:  # a fork of this process ends as Python does
            self._exit()

    def _cut_short(self) -> None:
        text = f"exit hooks (atexit) took longer than {HOOKS_S:g} s; the task ends without the rest of them\n"
        # not `print`: the lock of the stream may be held by the thread that hangs
        os.write(2, text.encode())
        os._exit(self._code or 0)

    def _exit(self) -> NoReturn:
        _flush()
        os._exit(self._code or 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            OSError, ValueError
        ):  # a full disk, or a closed stream; the exit code still tells the result
            stream.flush()


end_process = ProcessEnd()
"""The end of this process."""
