"""Limits of the system on the open files of the launcher."""

from __future__ import annotations

import resource

from distlaunch.base.errors import UsageError

_FILES_PER_TASK = 5
"""Two pipes, two logs and a port."""
_OTHER_FILES = 100  # of the launcher itself: libraries, events, sockets


def allow_open_files(num_tasks: int) -> None:
    """Makes room for the files of so many tasks. Raises UsageError if the system does not allow it."""
    needed = num_tasks * _FILES_PER_TASK + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(f"{num_tasks:,} tasks need {needed:,} open files, and `ulimit -Hn` allows {hard:,}")
    # only as many as needed: children inherit the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
