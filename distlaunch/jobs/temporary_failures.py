"""Temporary failures of a job: one that recurs at the same step becomes a permanent one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

from distlaunch.base.errors import DistlaunchError, ExitCode, code_of_os_error
from distlaunch.base.event_files import append_events, read_event_sample
from distlaunch.base.events import LAUNCHER, Event, JobFailed, RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.jobs.attempt import AttemptResult

MAX_TEMPORARY_FAILURES = 3
"""Number of failures in a row, at the same step and with causes outside the job. The last one counts as permanent."""


def limit_temporary_failures(run: RunDir, result: AttemptResult) -> AttemptResult:
    """Return the result with a permanent exit code if it is the last of several temporary failures in a row."""
    outcome = result.outcome
    if outcome.status != "failed":
        return result
    code, why = _record_failure(run, outcome.exit_code)
    warnings = (*outcome.warnings, why) if why else outcome.warnings
    return dataclasses.replace(result, outcome=dataclasses.replace(outcome, exit_code=code, warnings=warnings))


@contextlib.contextmanager
def limiting_temporary_errors(run: RunDir) -> Generator[None]:
    """Handle errors that come before an attempt starts.

    If an error is the last of several temporary errors in a row, raise DistlaunchError in its place.
    """
    try:
        yield
    except (OSError, DistlaunchError) as error:
        code = code_of_os_error(error) if isinstance(error, OSError) else error.exit_code
        if code is not ExitCode.TEMPORARY or not run.attempts():
            raise
        code, why = _record_failure(run, code)
        if why:
            raise DistlaunchError(f"{error}; {why}") from None
        raise


def _record_failure(run: RunDir, code: int) -> tuple[int, str]:
    """Record a failure of the job; return the final exit code, and the reason if this code differs from `code`."""
    events = read_event_sample(run.events)
    step, why = _last_step(run, events), ""
    if code == ExitCode.TEMPORARY and _num_temporary_failures(events, step) + 1 >= MAX_TEMPORARY_FAILURES:
        code = ExitCode.FAILED
        why = (
            f"the job has failed {MAX_TEMPORARY_FAILURES} times in a row at step {step} for a cause outside the job: "
            f"exit code {int(code)}"
        )
    failed = JobFailed(exit_code=int(code), step=step)
    append_events(run.events, failed, attempt=max(run.attempts(), default=0), task=LAUNCHER)
    return code, why


def _last_step(run: RunDir, events: list[Event]) -> int:
    """Return the last step of the last attempt, or the step from which it would have started."""
    attempts = RunFacts.of(events).attempts
    last = attempts[max(attempts)] if attempts else None
    if last is not None and last.training is not None:
        return last.step
    return max(run.checkpoint_steps(), default=0)


def _num_temporary_failures(events: list[Event], step: int) -> int:
    """Return how many temporary failures at a step there have been since the last end of another kind."""
    number = 0
    for event in reversed(events):
        if isinstance(event, JobFailed):
            if event.exit_code != ExitCode.TEMPORARY or event.step != step:
                break
            number += 1
        elif isinstance(event, RunEnded) and event.status != "failed":
            break
    return number
