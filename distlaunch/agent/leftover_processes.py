"""Ends, at the end of a job, processes such as daemons that have left the process group of their task."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence

import psutil

from distlaunch.base.protocol import ATTEMPT, RUN_DIR, TASK

_ENDS_WITHIN_S = 2.0


def end_leftovers(run_dir: str, attempt: int, tasks: Collection[str], within_s: float = _ENDS_WITHIN_S) -> str:
    """End the processes of this host whose environment names a task of an attempt.

    A process that has removed DISTLAUNCH_RUN_DIR from its environment is not part of the job, and neither is a detached
    launcher.

    Args:
        run_dir: the value of DISTLAUNCH_RUN_DIR.
        tasks: the tasks that were started from this process; other tasks may still work on the attempt.
        within_s: time from SIGTERM to SIGKILL.

    Returns:
        A line that names the processes, or an empty string if there were none.
    """
    left = list(_find_leftovers(run_dir, str(attempt), tasks))
    named = [f"{process.info['name']} ({process.pid})" for process in left]
    for process in left:
        _signal(process, gently=True)
    for process in psutil.wait_procs(left, within_s)[1]:
        _signal(process, gently=False)
    return f"ended processes that tasks had left running: {', '.join(named)}" if named else ""


def _find_leftovers(run_dir: str, attempt: str, tasks: Collection[str]) -> Iterator[psutil.Process]:
    launcher = {os.getpid(), *(parent.pid for parent in _ancestors(psutil.Process()))}
    for process in psutil.process_iter(["name", "uids", "status"]):
        try:
            is_mine = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
            if process.pid in launcher or not is_mine or process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            environ = process.environ()
            belongs = environ.get(RUN_DIR) == run_dir and environ.get(ATTEMPT) == attempt and environ.get(TASK) in tasks
            if belongs and not _is_detached(process):
                yield process
        except psutil.Error:  # the process has just ended, or its environment cannot be read
            continue


def _ancestors(process: psutil.Process) -> list[psutil.Process]:
    """Return the ancestors of a process, nearest first, up to the first that cannot be inspected."""
    found = list[psutil.Process]()
    # with the mount option hidepid of /proc, the processes of other users cannot be inspected
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        while parent is not None:
            found.append(parent)
            parent = parent.parent()
    return found


def _is_detached(process: psutil.Process) -> bool:
    """Return True for a launcher that was started with --detach, and for its child processes."""
    for each in (process, *_ancestors(process)):
        try:
            words = each.cmdline()
        except psutil.AccessDenied:
            continue
        if _starts_detached(words):
            return True
    return False


def _starts_detached(words: Sequence[str]) -> bool:
    """Return whether a command line is that of `distlaunch train --detach`, also as `python -m distlaunch`."""
    for place, (before, word) in enumerate(itertools.pairwise(["", *words])):
        is_entry = os.path.basename(word) == "distlaunch" or (before in ("-m", "-c") and "distlaunch" in word)
        if is_entry and words[place + 1 : place + 2] == ["train"]:
            # `-qd` means `-q -d`
            return any(each == "--detach" or re.fullmatch("-[a-z]*d[a-z]*", each) for each in words[place + 2 :])
    return False


def _signal(process: psutil.Process, *, gently: bool) -> None:
    try:
        process.terminate() if gently else process.kill()
    except psutil.Error:
        return
