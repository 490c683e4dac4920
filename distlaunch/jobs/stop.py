"""Stops a run whose launcher is another process of this machine."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from distlaunch.base.errors import DistlaunchError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_lock import Owner
from distlaunch.runs.paths import shown

PRESSES_APART_S = 0.5
"""Two Ctrl-C within a moment would count as one."""


def stop_run(run: RunDir, *, at_once: bool = False, timeout_s: float | None = None) -> bool:
    """Asks the launcher of a run to end, as SIGTERM or two Ctrl-C do, and waits until it is gone.

    Returns whether there was one. Raises UsageError if it cannot be asked, DistlaunchError if it takes too long.
    """
    owner = run.owner()
    if owner is None:
        return False
    name = shown(run.path)
    _check(owner, name)
    try:
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        if run.owner() is None:
            return False
        # a container has numbers of its own for its processes
        raise UsageError(
            f"{name}: its launcher ({owner.told}) cannot be seen from here; stop it where it runs"
        ) from None
    try:
        # who has held the lock before and after is the process that the descriptor means, however old the number
        if run.owner() != owner:
            return run.owner() is not None and stop_run(run, at_once=at_once, timeout_s=timeout_s)
        if at_once and _ignores(owner.pid, signal.SIGINT):
            raise UsageError(
                f"{name}: its launcher ({owner.told}) was started with Ctrl-C ignored, as `&` in a script does; "
                "stop it without --now"
            )
        began = time.monotonic()
        _send(process, signal.SIGINT if at_once else signal.SIGTERM, name)
        if at_once and not _gone(process, PRESSES_APART_S):
            _send(process, signal.SIGINT, name)
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        if not _gone(process, left):
            raise DistlaunchError(f"{name}: its launcher ({owner.told}) still works after {timeout_s:g} s")
    finally:
        os.close(process)
    return True


def _check(owner: Owner, name: str) -> None:
    """Whether the owner may be signalled at all. Raises UsageError."""
    if not owner.is_here:
        raise UsageError(f"{name}: its launcher is {owner.told}; it can only be stopped there")
    if owner.notebook:
        raise UsageError(f"{name}: it runs in a notebook ({owner.told}); interrupt it there")
    if not owner.pid:
        raise UsageError(f"{name}: its launcher has not said yet which process it is; try again")


def _ignores(pid: int, number: signal.Signals) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has just ended
    for line in text.splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _send(process: int, number: signal.Signals, name: str) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return  # it has just ended
    except PermissionError:
        raise UsageError(f"{name}: its launcher belongs to another user; stop it as that user") from None


def _gone(process: int, timeout_s: float | None) -> bool:
    """Waits for the end of a process."""
    return bool(select.select([process], [], [], timeout_s)[0])
