"""The lock of a run. The process that works on the run holds it, and writes its own identity into it.

Where a disk has no locks, the identity alone counts, as long as its process lives, and touches the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from distlaunch.base.errors import RunBusyError, UsageError
from distlaunch.base.file_locks import lock

NOTEBOOK = "notebook"

_TRIES = 3
_MOMENT_S = 0.02
_TURN_S = 0.2
TOUCH_S, _FRESH_S = 10.0, 60.0
"""On disks without locks: interval at which the file is touched, and time for which that counts, in seconds."""


class Owner(NamedTuple):
    """The owner of a lock.

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
        """Parse the result of `str`."""
        pid, host, kind, *_ = [*text.split(), "", "", ""]
        return Owner(int(pid), host, kind == NOTEBOOK) if pid.isdigit() else Owner()

    def __str__(self) -> str:
        return f"{self.pid} {self.host}" + (f" {NOTEBOOK}" if self.notebook else "")

    @property
    def is_here(self) -> bool:
        """Return True if its process is on this machine."""
        return self.host in ("", socket.gethostname())

    @property
    def description(self) -> str:
        """Return `process 12` or `process 12 on other-host`."""
        where = "" if self.is_here else f" on {self.host}"
        return f"process {self.pid or 'unknown'}{where}"


@contextlib.contextmanager
def lock_run(path: Path, *, notebook: bool = False) -> Generator[None]:
    """Hold the lock; the system releases it if this process dies. Raise RunBusyError if another process holds it."""
    # a task that inherited it would hold the lock after the launcher's death
    fd = _opened(path, os.O_RDWR | os.O_CREAT)
    try:
        has_locks = _take(fd, path)
        # only now: until it is held, the file names somebody else
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(Owner(os.getpid(), socket.gethostname(), notebook)).encode(), 0)
        with contextlib.nullcontext() if has_locks else _touched(fd):
            yield
    finally:
        # gives the lock up
        os.close(fd)


@contextlib.contextmanager
def lock_when_free(
    path: Path, what: str, say: Callable[[str], None], gives_up: Callable[[float], bool]
) -> Generator[None]:
    """Hold a lock as `lock_run` does, but wait while another process holds it.

    Args:
        what: it writes meanwhile, in words.
        say: called before the wait.
        gives_up: called with the seconds waited so far.

    Raises:
        RunBusyError: another process still holds it.
    """
    began, who = time.monotonic(), ""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_run(path))
                break
            except RunBusyError:
                if not who:
                    owner = owner_of(path)
                    who = owner.description if owner is not None else "another process"
                    say(f"waiting for {who}, which writes {what}")
                if gives_up(time.monotonic() - began):
                    raise RunBusyError(f"{who} was still writing {what}") from None
                time.sleep(_TURN_S)
        yield


def _opened(path: Path, flags: int) -> int:
    """Return a descriptor of the lock. Raises UsageError if it leads to another file, which would be overwritten."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise UsageError(f"{path}: is a link, or no regular file; remove it, or use another run") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path}: is no regular file; remove it, or use another run")
    return fd


def _take(fd: int, path: Path) -> bool:
    """Whether it is held; else the disk has no locks, and nobody else works on the run. Raises RunBusyError."""
    for left in reversed(range(_TRIES)):
        try:
            if lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return True
            owner = _named_owner(fd)
            if owner is None:
                return False
        except BlockingIOError:
            owner = _read(fd)
        if not left:
            message = f"{path.parent}: this run is still running ({owner.description}); `distlaunch stop` ends it"
            raise RunBusyError(message) from None
        time.sleep(_MOMENT_S)  # `owner_of` of somebody who only looks holds it for an instant
    raise AssertionError


@contextlib.contextmanager
def _touched(fd: int) -> Generator[None]:
    """Meanwhile the file is fresh; afterwards it names nobody."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(fd)

    thread = threading.Thread(target=touch, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)


def _read(fd: int) -> Owner:
    return Owner.parse(os.pread(fd, 256, 0).decode(errors="replace"))


def _is_alive(pid: int) -> bool:
    import psutil  # only where it is needed: it costs 20 ms

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _named_owner(fd: int) -> Owner | None:
    """Whom the file names, unless that process is gone."""
    owner = _read(fd)
    if not owner.pid or time.time() - os.fstat(fd).st_mtime > _FRESH_S:
        return None
    return owner if not owner.is_here or _is_alive(owner.pid) else None


def owner_of(path: Path) -> Owner | None:
    """Who holds the lock now; None: nobody, whatever the file says."""
    try:
        fd = _opened(path, os.O_RDONLY)
    except (OSError, UsageError):
        return None
    try:
        # shared: several may look at the same time
        return None if lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB) else _named_owner(fd)
    except BlockingIOError:
        return _read(fd)
    finally:
        os.close(fd)
