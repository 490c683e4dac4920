"""The exit code of a job that has failed: a cause outside the job may pass, but not again and again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

from distlaunch.base.errors import DistlaunchError, ExitCode, code_of_os_error
from distlaunch.base.event_files import append_events, read_events
from distlaunch.base.events import Event, JobFailed, RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.supervise.run_events import LAUNCHER

MOST = 3
"""Ends in a row with a cause outside the job and at the same step; the last of them counts as a failure of the job."""


def judge_result(run: RunDir, result: AttemptResult) -> AttemptResult:
    """Return a result with the exit code that the run's earlier ends make of it."""
    outcome = result.outcome
    if outcome.status != "failed":
        return result
    code, why = _judge(run, outcome.exit_code)
    warnings = (*outcome.warnings, why) if why else outcome.warnings
    return dataclasses.replace(result, outcome=dataclasses.replace(outcome, exit_code=code, warnings=warnings))


@contextlib.contextmanager
def judging_errors(run: RunDir) -> Generator[None]:
    """Raise DistlaunchError instead of the last of several errors in a row that keep a run's attempts from starting."""
    try:
        yield
    except (OSError, DistlaunchError) as error:
        code = code_of_os_error(error) if isinstance(error, OSError) else error.exit_code
        if code is not ExitCode.TEMPORARY or not run.attempts():
            raise
        code, why = _judge(run, code)
        if why:
            raise DistlaunchError(f"{error}; {why}") from None
        raise


def _judge(run: RunDir, code: int) -> tuple[int, str]:
    events = read_events(run.events)
    step, why = _reached(run, events), ""
    if code == ExitCode.TEMPORARY and _num_in_row(events, step) + 1 >= MOST:
        code = ExitCode.FAILED
        why = f"it has ended {MOST} times in a row at step {step} by a cause outside the job: exit code {int(code)}"
    failed = JobFailed(exit_code=int(code), step=step)
    append_events(run.events, failed, attempt=max(run.attempts(), default=0), task=LAUNCHER)
    return code, why


def _reached(run: RunDir, events: list[Event]) -> int:
    """Return the step of the last attempt, or where it would have begun."""
    attempts = RunFacts.of(events).attempts
    last = attempts[max(attempts)] if attempts else None
    if last is not None and last.training is not None:
        return last.step
    return max(run.checkpoint_steps(), default=0)


def _num_in_row(events: list[Event], step: int) -> int:
    number = 0
    for event in reversed(events):
        if isinstance(event, JobFailed):
            if event.exit_code != ExitCode.TEMPORARY or event.step != step:
                break
            number += 1
        elif isinstance(event, RunEnded) and event.status != "failed":
            break
    return number
