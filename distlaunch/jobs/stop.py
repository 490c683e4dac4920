"""Sends requests to the controller of a run, another process: to stop, or to write the stacks of its tasks."""

from __future__ import annotations

import contextlib
import time

from distlaunch.base.control import Connection, Request
from distlaunch.base.errors import NotStoppedError, QueueBusyError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_lock import Owner
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.engines import make_queue
from distlaunch.jobs.batch.job_states import job_state, live_job
from distlaunch.runs.paths import shown

_OPENS_WITHIN_S = 5.0
"""A controller has the run for a moment before it takes requests, and after."""
_ANSWERS_WITHIN_S = 10.0
_QUERY_INTERVAL_S = 1.0
_CHECK_INTERVAL_S = 0.02  # while the socket is not there yet


def stop_run(run: RunDir, *, at_once: bool = False, timeout_s: float | None = None) -> bool:
    """Ask the controller of a run to end, as SIGTERM or two Ctrl-C do, and wait until it has ended.

    Returns whether there was one. Raises UsageError if it cannot be asked, NotStoppedError if it takes too long.
    """
    began = time.monotonic()
    # its queue is asked first: a launcher that is stopped by itself would be queued again
    if (job := live_job(run)) is not None:
        _stop_submitted(run, *job, at_once=at_once, until=None if timeout_s is None else began + timeout_s)
        return True
    # before the connection: it names the process in messages also when that has ended meanwhile
    owner = run.owner()
    connection = _connect(run)
    if connection is None or owner is None:
        return False
    with connection:
        left = timeout_s
        if _request(connection, "stop-now" if at_once else "stop", run, owner):
            # 0 would mean a socket that never waits
            left = None if timeout_s is None else max(0.001, timeout_s - (time.monotonic() - began))
            if not connection.wait(left):
                raise NotStoppedError(
                    f"{shown(run.path)}: its launcher ({owner.description}) still works after {timeout_s:g} s"
                )
    return True


def _stop_submitted(run: RunDir, job: Submission, state: JobState, *, at_once: bool, until: float | None) -> None:
    queue = make_queue(job.engine)
    is_requested = False
    while state.phase != "ended" and not (is_requested and run.job_exit_code() is not None):
        with contextlib.suppress(QueueBusyError):  # or it has ended meanwhile: the next look shows it
            if state.phase == "pending":
                queue.cancel(job)
            elif not is_requested:
                queue.stop(job, at_once=at_once)
                is_requested = True
        if until is not None and time.monotonic() >= until:
            raise NotStoppedError(f"{shown(run.path)}: job {job.job} has not ended yet ({state})")
        time.sleep(_QUERY_INTERVAL_S)
        state = job_state(job) or state


def ask_for_stacks(run: RunDir) -> bool:
    """Make every task of a run write its Python stacks to its error log; return False if the run is not running."""
    owner, connection = run.owner(), _connect(run)
    if connection is None or owner is None:
        return False
    with connection:
        return _request(connection, "stacks", run, owner)


def _request(connection: Connection, request: Request, run: RunDir, owner: Owner) -> bool:
    """Send a request; return False if the controller has ended in the meantime."""
    try:
        refused = connection.ask(request, _ANSWERS_WITHIN_S)
    except TimeoutError:
        raise NotStoppedError(f"{shown(run.path)}: its launcher ({owner.description}) does not answer") from None
    except ConnectionError:
        return False
    if refused:
        raise UsageError(f"{shown(run.path)}: {refused}")
    return True


def _connect(run: RunDir) -> Connection | None:
    """Connect to the controller of the run; return None if there is none. Raise UsageError if it cannot be reached."""
    until = time.monotonic() + _OPENS_WITHIN_S
    while (owner := run.owner()) is not None:
        _check(owner, shown(run.path))
        try:
            return Connection(run.control)
        except PermissionError:
            raise UsageError(f"{shown(run.path)}: its launcher belongs to another user; stop it as that user") from None
        except OSError:
            if time.monotonic() >= until:
                launcher = f"{shown(run.path)}: its launcher ({owner.description})"
                raise UsageError(f"{launcher} takes no requests; send it SIGTERM where it runs") from None
        time.sleep(_CHECK_INTERVAL_S)
    return None


def _check(owner: Owner, name: str) -> None:
    """Raise UsageError if the controller runs elsewhere or cannot be asked."""
    if not owner.is_here:
        raise UsageError(f"{name}: its launcher is {owner.description}; it can only be stopped there")
    if owner.notebook:
        raise UsageError(f"{name}: it runs in a notebook ({owner.description}); interrupt it there")
