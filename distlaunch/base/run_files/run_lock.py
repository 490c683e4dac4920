"""The lock of a run. The process that works on the run holds it, and writes its own identity into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import RunBusyError

NOTEBOOK = "notebook"

_TRIES = 3
_MOMENT_S = 0.02


@dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes:
        pid: 0: it has not written it yet.
        host: empty: not known.
        notebook: it is a process of the user's own, which does more than to launch.
    """

    pid: int = 0
    host: str = ""
    notebook: bool = False

    @staticmethod
    def parse(text: str) -> Owner:
        """What `str` has made."""
        pid, host, kind, *_ = [*text.split(), "", "", ""]
        return Owner(int(pid), host, kind == NOTEBOOK) if pid.isdigit() else Owner()

    def __str__(self) -> str:
        return f"{self.pid} {self.host}" + (f" {NOTEBOOK}" if self.notebook else "")

    @property
    def is_here(self) -> bool:
        """Whether its process can be found on this machine."""
        return self.host in ("", socket.gethostname())

    @property
    def description(self) -> str:
        """`process 12`, `process 12 on other-host`."""
        where = "" if self.is_here else f" on {self.host}"
        return f"process {self.pid or 'unknown'}{where}"


@contextlib.contextmanager
def lock_run(path: Path, *, notebook: bool = False) -> Iterator[None]:
    """Holds the lock; the system drops it if this process dies. Raises RunBusyError if another process holds it."""
    # a task that inherited it would hold the lock after the launcher's death
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not left:
                    owner = Owner.parse(os.pread(fd, 256, 0).decode(errors="replace"))
                    raise RunBusyError(
                        f"{path.parent}: this run is still running ({owner.description}); `distlaunch stop` ends it"
                    ) from None
                time.sleep(_MOMENT_S)  # `owner_of` of somebody who only looks holds it for an instant
        # only now: until it is held, the file names somebody else
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(Owner(os.getpid(), socket.gethostname(), notebook)).encode(), 0)
        yield
    finally:
        # gives the lock up
        os.close(fd)


def owner_of(path: Path) -> Owner | None:
    """Who holds the lock now; None: nobody, whatever the file says."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # shared: several may look at the same time
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return Owner.parse(os.pread(fd, 256, 0).decode(errors="replace"))
    finally:
        os.close(fd)
    return None
