"""The states of jobs that were submitted to a scheduler's queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from distlaunch.base.errors import DistlaunchError, ExitCode, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.runs.paths import display_path

_QUERY_INTERVAL_S = 5.0
"""Interval between queries: as long as a user at a terminal accepts, to spare the scheduler."""
_SHORT_QUERY_INTERVAL_S = 1.0
"""Interval between queries for a job whose launcher has ended and that may be requeued."""
_NOTHING_WRITTEN = "it wrote nothing into {}; is that on a disk that its nodes share?"


def live_job(run: RunDir) -> tuple[Submission, JobState] | None:
    """Return the submitted job of a run if it is pending or running; None if not, or if its queue does not answer."""
    job = run.live_submission()
    if job is None:
        return None
    state = job_state(job)
    return None if state is None or state.phase == "ended" else (job, state)


def state_of(run: RunDir) -> JobState | None:
    """Return the state of a run's submitted job; None if no job may still run, or its queue does not answer."""
    job = run.live_submission()
    return None if job is None else job_state(job)


def job_state(job: Submission) -> JobState | None:
    """Return the state of a job, or None if its queue does not answer here."""
    return job_states([job]).get(job)


def job_states(jobs: Iterable[Submission]) -> dict[Submission, JobState]:
    """Return the states of the jobs whose queues answer here; other jobs are left out."""
    found: dict[Submission, JobState] = {}
    by_engine: dict[str, list[Submission]] = {}
    for job in jobs:
        by_engine.setdefault(job.engine, []).append(job)
    for engine, members in by_engine.items():
        # there may be no scheduler on this machine, or it may just be restarting
        with contextlib.suppress(DistlaunchError, KeyError):
            found |= _ask_queue(engine, members)
    return found


def _ask_queue(engine: str, jobs: Sequence[Submission]) -> dict[Submission, JobState]:
    """Return the states of jobs. Raise QueueBusyError if their queue is silent, UsageError if it is not here."""
    from distlaunch.engines import make_queue  # imported here, since this import takes 0.15 s

    return make_queue(engine).states(jobs)


class JobWatch:
    """Follows a submitted job through its run directory and its queue.

    Args:
        note: shows a message about the job.
    """

    def __init__(self, run: RunDir, job: Submission, note: Callable[[str], None]) -> None:
        self._run, self._job, self._note = run, job, note
        self._queried_at: float | None = None
        self._last_note = ""
        self._state: JobState | None = None
        self._has_no_queue = False
        """True if this machine does not have the queue of the job."""

    def is_active(self) -> bool:
        """Return True if the job is pending or running, or if its queue has not answered yet.

        The answer may be a few seconds old. On a machine without the queue, the job is active while a launcher works on
        the run.

        Raises:
            UsageError: this machine does not have the queue, and the job has left no trace in the run directory.
        """
        if not self._run.may_run_again():
            return False
        now = time.monotonic()
        has_ended = self._run.job_exit_code() is not None
        if not self._has_no_queue and (
            self._queried_at is None
            or now - self._queried_at >= (_SHORT_QUERY_INTERVAL_S if has_ended else _QUERY_INTERVAL_S)
        ):
            self._query()
            self._queried_at = now
            self._note_state()
        if self._has_no_queue:
            return self._run.is_busy()
        return self._state is None or self._state.phase != "ended"

    def _query(self) -> None:
        try:
            states = _ask_queue(self._job.engine, [self._job])
        except UsageError as error:
            # commands that have worked before fail only for a while
            if self._state is not None:
                return
            if not self._run.attempts() and self._run.job_exit_code() is None:
                where = display_path(self._run.path)
                raise UsageError(f"{where}: the state of its job {self._job.job} is unknown: {error}") from None
            self._note(f"job {self._job.job}: {error}; a requeue is not noticed here")
            self._has_no_queue = True
        except (DistlaunchError, KeyError):
            return
        else:
            self._state = states.get(self._job, self._state)

    def exit_code(self) -> int:
        """Return the exit code of a job that has ended."""
        code = self._run.job_exit_code()
        if code is not None:
            return code
        word = self._state.word if self._state else ""
        if word == "CANCELLED":
            self._note(f"job {self._job.job} was cancelled")
            return ExitCode.PREEMPTED
        wrote = self._run.launcher_log.exists()
        where = (
            f"see {display_path(self._run.launcher_log)}"
            if wrote
            else _NOTHING_WRITTEN.format(display_path(self._run.path))
        )
        how = f" as {word}" if word else ""
        self._note(f"job {self._job.job} has ended{how} without reporting how the run ended; {where}")
        return ExitCode.TEMPORARY

    def _note_state(self) -> None:
        state = self._state
        # no note is needed once a running job has started an attempt: the output of the attempt shows that it runs
        is_shown = state is not None and (
            state.phase == "pending" or (state.phase == "running" and not self._run.attempts())
        )
        note = f"job {self._job.job}: {state}" if is_shown else ""
        if note and note != self._last_note:
            self._note(note)
        self._last_note = note
