"""The lock of a run. The process that works on the run holds the lock, and writes its identity into the file.

On a disk without locks, the run is locked as long as the process named in the file is alive and touches the file.
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
_RETRY_S = 0.02
_POLL_INTERVAL_S = 0.2
TOUCH_S, _FRESH_S = 10.0, 60.0
"""On disks without locks: interval in seconds at which the file is touched, and time in seconds after which a touch no
longer counts."""


class Owner(NamedTuple):
    """The owner of a lock.

    Attributes:
        pid: the process ID; 0 if the owner has not written it yet.
        host: the name of the host; empty if unknown.
        notebook: True if the owner is a notebook of the user rather than a launcher.
        started: start of the process in clock ticks since the boot, since a process ID may be used again; 0 if unknown.
    """

    pid: int = 0
    host: str = ""
    notebook: bool = False
    started: int = 0

    @staticmethod
    def here(*, notebook: bool = False) -> Owner:
        """Return this process as an owner."""
        started: int | None = None
        with contextlib.suppress(OSError):
            started = _start_of(os.getpid())
        return Owner(os.getpid(), socket.gethostname(), notebook, started or 0)

    @staticmethod
    def parse(text: str) -> Owner:
        """Parse the result of `str`."""
        pid, host, started, kind, *_ = [*text.split(), "", "", "", ""]
        if not pid.isdigit():
            return Owner()
        return Owner(int(pid), host, kind == NOTEBOOK, int(started) if started.isdigit() else 0)

    def __str__(self) -> str:
        return f"{self.pid} {self.host} {self.started}" + (f" {NOTEBOOK}" if self.notebook else "")

    @property
    def is_here(self) -> bool:
        """Return True if the owner is on this machine, or if its host is unknown."""
        return self.host in ("", socket.gethostname())

    @property
    def description(self) -> str:
        """Return `process 12` or `process 12 on other-host`."""
        where = "" if self.is_here else f" on {self.host}"
        return f"process {self.pid or 'unknown'}{where}"


@contextlib.contextmanager
def lock_run(path: Path, *, notebook: bool = False) -> Generator[None]:
    """Hold the lock; the system releases it if this process dies. Raise RunBusyError if another process holds it."""
    # children must not inherit the descriptor: they would hold the lock after the launcher's death
    fd = _open_lock_file(path, os.O_RDWR | os.O_CREAT)
    try:
        has_locks = _acquire(fd, path)
        # write only while holding the lock: before that, the file names another owner
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(Owner.here(notebook=notebook)).encode(), 0)
        with contextlib.nullcontext() if has_locks else _touching(fd):
            yield
    finally:
        # closing the file releases the lock
        os.close(fd)


@contextlib.contextmanager
def lock_when_free(
    path: Path, what: str, say: Callable[[str], None], gives_up: Callable[[float], bool]
) -> Generator[None]:
    """Hold a lock like `lock_run`, but wait while another process holds it.

    Args:
        what: words for the thing that the other process writes.
        say: called with a message before the wait.
        gives_up: called with the seconds waited so far; returns True to stop waiting.

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
                    say(f"waiting for {who}, which is writing {what}")
                if gives_up(time.monotonic() - began):
                    raise RunBusyError(f"{who} was still writing {what}") from None
                time.sleep(_POLL_INTERVAL_S)
        yield


def _open_lock_file(path: Path, flags: int) -> int:
    """Return a descriptor of the lock file. Raise UsageError if it is a link or not a regular file."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise UsageError(f"{path} is a link, or not a regular file; remove it, or use another run") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} is not a regular file; remove it, or use another run")
    return fd


def _acquire(fd: int, path: Path) -> bool:
    """Acquire the lock; return False if the disk has no locks and no other process works on the run.

    Raises:
        RunBusyError: another process works on the run.
    """
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
        time.sleep(_RETRY_S)  # the lock may be held only briefly, by another process that is in `owner_of`
    raise AssertionError


@contextlib.contextmanager
def _touching(fd: int) -> Generator[None]:
    """Touch the file regularly within the block, and empty it afterwards."""
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


def _start_of(pid: int) -> int | None:
    """Return when a process of this machine has started, as in `Owner.started`; None if it has ended.

    Raises:
        OSError: this user may not inspect the process, or the system has no /proc.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name of the program, in parentheses, may contain spaces and parentheses
            fields = file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
        raise
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _named_owner(fd: int) -> Owner | None:
    """Return the owner that the file names, or None if its process has ended or no longer touches the file.

    A living process of this machine need not touch the file: it may be suspended.
    """
    owner = _read(fd)
    if not owner.pid:
        return None
    if owner.is_here:
        with contextlib.suppress(OSError):  # only the file can show whether it is alive
            started = _start_of(owner.pid)
            if started is None or owner.started:
                return owner if started == owner.started else None
    return owner if time.time() - os.fstat(fd).st_mtime <= _FRESH_S else None


def owner_in(path: Path) -> Owner:
    """Return the process that the file names, whether or not it holds the lock; one without an ID if there is none."""
    try:
        fd = _open_lock_file(path, os.O_RDONLY)
    except (OSError, UsageError):
        return Owner()
    try:
        return _read(fd)
    finally:
        os.close(fd)


def owner_of(path: Path) -> Owner | None:
    """Return the process that holds the lock now; None if the lock is free or its file cannot be opened."""
    try:
        fd = _open_lock_file(path, os.O_RDONLY)
    except (OSError, UsageError):
        return None
    try:
        # use a shared lock, since several processes may test the lock at the same time
        return None if lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB) else _named_owner(fd)
    except BlockingIOError:
        return _read(fd)
    finally:
        os.close(fd)
