"""Runs whose submitted job does not run: it waits, or has left its queue without a start."""

from __future__ import annotations

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import JobState

PENDING = "pending"
"""Its job waits in a queue."""
CANCELLED = "cancelled"
"""Its job has left the queue without a start."""
SUBMITTED = "submitted"
"""Its job has written nothing yet, and its queue does not answer here."""


def status_in_queue(run: RunDir, job: JobState | None) -> str:
    """The status of a run that nobody works on, if that is up to its job; else empty.

    Args:
        job: how it stands; None: there is none, or nobody knows.
    """
    if job is not None and job.phase == "pending":
        return PENDING
    if run.attempts() or run.submission() is None:
        return ""
    if run.job_exit_code() is not None or (job is not None and job.word not in ("", "CANCELLED")):
        return "failed"
    return SUBMITTED if job is None else CANCELLED
