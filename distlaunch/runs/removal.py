"""Removes run directories, but never that of a run on which a process works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from distlaunch.base.errors import RunBusyError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.runs.report import PENDING, RUNNING, SUBMITTED


def reason_to_keep(run: RunDir, status: str, states: Mapping[Submission, JobState]) -> str:
    """Return why a run must not be removed, or an empty string.

    Args:
        status: see `RunSummary`.
        states: the states of the submitted jobs whose queues answer.
    """
    if run.path.is_symlink():
        return "it is a link; remove it with `rm`"
    if status in (RUNNING, PENDING, SUBMITTED):
        return f"it is {status}"
    if run.is_busy() or any(run.reader_is_busy(number) for number in run.attempts()):
        return "a process works on it"
    job = run.live_submission()
    if job is not None and job not in states:
        return (
            f"its job {job.job} may run again, and the queue does not answer here; if it has ended, remove it with `rm`"
        )
    return ""


def remove_run(run: RunDir) -> str:
    """Remove a run; return why it could not be removed completely, or an empty string."""
    try:
        # the lock keeps a launcher from resuming the run meanwhile
        with run.lock():
            if any(run.reader_is_busy(number) for number in run.attempts()):
                return "a process works on it; nothing was removed"
            run.remove()
    except RunBusyError:
        return "a process works on it; nothing was removed"
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total
