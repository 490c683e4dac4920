"""How a task's process ends: the user's exit hooks run, for a short time; the frameworks' own do not."""

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
"""How long exit hooks may take, all together: less than a launcher waits for a task that has nothing to save."""


class ProcessEnd:
    """Ends this process with an exit code that nothing on the way can change or hold up.

    Python's own way waits for threads that are not daemons, and TensorFlow and JAX wait at their exit for peers that
    may be gone; JAX ends the process itself when one is.
    """

    def __init__(self) -> None:
        self._code: int | None = None

    def skip_earlier_hooks(self) -> None:
        """To be called when the frameworks are imported and the user's code is not: hooks run in reverse order, so
        those registered before this call are never reached. Python's own are moved behind it."""
        atexit.register(self._leave)
        for own in (logging.shutdown, weakref.finalize._exitfunc):  # such as buffered logs and temporary directories
            atexit.unregister(own)
            atexit.register(own)

    def __call__(self, code: int) -> None:
        """Does not return, but in a signal handler that comes while the process is ending already."""
        if self._code is not None:
            return
        # first: a second call, from a signal handler, returns at once
        self._code = code
        _flush()
        watchdog = threading.Timer(HOOKS_S, self._cut_short)
        # it must not be what this process waits for
        watchdog.daemon = True
        watchdog.start()
        atexit._run_exitfuncs()  # prints what a hook raises, and goes on with the next
        self._exit()

    def _leave(self) -> None:
        if self._code is not None:  # not in a fork of this process, which ends as Python does
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
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed: the exit code says how it went
            stream.flush()


end_process = ProcessEnd()
"""Of this process."""
