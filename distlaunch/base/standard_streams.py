"""Standard streams that were closed when a command was started, as `distlaunch train a.yaml >&-` does."""

from __future__ import annotations

import io
import os
import sys


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next file or socket would get its number, and receive what is printed; and Python has None in its
    place, which cannot be flushed.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # the lowest number that is free, which is this one
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    # a name that is not UTF-8, or a letter that the terminal's encoding does not have, is no reason to fail
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))
