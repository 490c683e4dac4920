"""Sends requests to the launcher of a run in another process: to stop, or to make its tasks write their stacks."""

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
from distlaunch.runs.paths import display_path

_OPENS_WITHIN_S = 5.0
"""Time to wait for a launcher's socket. A launcher locks the run a moment before it accepts requests."""
_ANSWERS_WITHIN_S = 10.0
_QUERY_INTERVAL_S = 1.0
_CHECK_INTERVAL_S = 0.02  # while the socket is not there yet


def stop_run(run: RunDir, *, at_once: bool = False, timeout_s: float | None = None) -> bool:
    """Ask the launcher of a run to end, and wait until it has ended.

    Args:
        at_once: end as after two Ctrl-C instead of as after SIGTERM.

    Returns:
        False if no launcher works on the run, and no job that was submitted for it is pending or running.

    Raises:
        UsageError: the launcher cannot be asked from here.
        NotStoppedError: it has not ended within `timeout_s`.
    """
    began = time.monotonic()
    # stop the job through its queue: if only its launcher ended, the queue would requeue the job
    if (job := live_job(run)) is not None:
        _stop_submitted(run, *job, at_once=at_once, until=None if timeout_s is None else began + timeout_s)
        return True
    # read the owner first, so that messages can name a launcher that ends during the connection
    owner = run.owner()
    connection = _connect(run)
    if connection is None or owner is None:
        return False
    with connection:
        left = timeout_s
        if _request(connection, "stop-now" if at_once else "stop", run, owner):
            # a timeout of 0 would make the socket non-blocking
            left = None if timeout_s is None else max(0.001, timeout_s - (time.monotonic() - began))
            if not connection.wait(left):
                launcher = f"its launcher ({owner.description})"
                raise NotStoppedError(f"{display_path(run.path)}: {launcher} is still running after {timeout_s:g} s")
    return True


def _stop_submitted(run: RunDir, job: Submission, state: JobState, *, at_once: bool, until: float | None) -> None:
    queue = make_queue(job.engine)
    is_requested = False
    while state.phase != "ended" and not (is_requested and run.job_exit_code() is not None):
        with contextlib.suppress(QueueBusyError):  # the job may have ended meanwhile: the next query shows that
            if state.phase == "pending":
                queue.cancel(job)
            elif not is_requested:
                queue.stop(job, at_once=at_once)
                is_requested = True
        if until is not None and time.monotonic() >= until:
            raise NotStoppedError(f"{display_path(run.path)}: job {job.job} has not ended yet ({state})")
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
    """Send a request; return False if the launcher has ended in the meantime."""
    try:
        refused = connection.ask(request, _ANSWERS_WITHIN_S)
    except TimeoutError:
        raise NotStoppedError(f"{display_path(run.path)}: its launcher ({owner.description}) does not answer") from None
    except ConnectionError:
        return False
    if refused:
        raise UsageError(f"{display_path(run.path)}: {refused}")
    return True


def _connect(run: RunDir) -> Connection | None:
    """Connect to the launcher of the run; return None if there is none. Raise UsageError if it cannot be reached."""
    until, name = time.monotonic() + _OPENS_WITHIN_S, display_path(run.path)
    while (owner := run.owner()) is not None:
        if owner.notebook:
            raise UsageError(f"{name} runs in a notebook ({owner.description}); interrupt it there")
        try:
            # try it whatever the name of the host: another container of this machine may have another name
            return Connection(run.control)
        except PermissionError:
            raise UsageError(f"{name}: its launcher belongs to another user; stop it as that user") from None
        except OSError:
            if not owner.is_here:
                raise UsageError(f"{name}: its launcher is {owner.description}; stop it on that host") from None
            if time.monotonic() >= until:
                launcher = f"{name}: its launcher ({owner.description})"
                raise UsageError(f"{launcher} accepts no requests; send SIGTERM to that process") from None
        time.sleep(_CHECK_INTERVAL_S)
    return None
