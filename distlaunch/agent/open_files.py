"""Limits of the system on the open files of a process that serves many tasks or hosts."""

from __future__ import annotations

import resource

from distlaunch.base.errors import UsageError

FILES_PER_TASK = 5
"""Open files per task: two pipes, two logs and a port."""
_OTHER_FILES = 100  # files of the process itself: libraries, events, sockets


def allow_open_files(number: int, what: str) -> None:
    """Raise the limit on open files so that `number` more can be opened.

    Args:
        what: words for the things that need the files, used in the error.

    Raises:
        UsageError: the system does not allow it.
    """
    needed = number + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(f"{what} need {needed:,} open files, and `ulimit -Hn` allows {hard:,}")
    # raise the limit only as far as needed, since children inherit it
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
