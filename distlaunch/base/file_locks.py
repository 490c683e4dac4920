"""Locks files. Some network disks do not support that: Lustre without `flock`, NFS without lockd."""

from __future__ import annotations

import errno
import fcntl

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def lock(fd: int, operation: int) -> bool:
    """Lock like `fcntl.flock`; return False if the disk has no locks. Raise BlockingIOError if the lock is held."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
