"""Limits of the system on the open files of a process that serves many tasks or hosts."""

from __future__ import annotations

import resource

from distlaunch.base.errors import UsageError

FILES_PER_TASK = 5
"""Two pipes, two logs and a port."""
_OTHER_FILES = 100  # of the process itself: libraries, events, sockets


def allow_open_files(number: int, what: str) -> None:
    """Raise the limit on open files so that `number` more can be opened.

    Args:
        what: what needs the files, for the error.

    Raises:
        UsageError: the system does not allow it.
    """
    needed = number + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(f"{what} need {needed:,} open files, and `ulimit -Hn` allows {hard:,}")
    # only as many as needed: children inherit the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
