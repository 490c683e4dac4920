"""The diagnosis of a failed attempt, also if a part of the diagnosis itself fails."""

from __future__ import annotations

import dataclasses
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from distlaunch.base.errors import Problem
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.diagnose.first_failure import (
    Traces,
    config_problems,
    find_failure,
    is_lost,
    is_outside_job,
    is_retryable,
    mark_of,
)
from distlaunch.supervise.state import Cause
from distlaunch.supervise.verdict import Verdict

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Diagnosis:
    """What `Outcome` says of a failure. `is_retryable` does not know whether somebody asked to stop.

    Attributes:
        outside: it has a proven cause outside the job, and a later try may succeed.
    """

    problems: tuple[Problem, ...] = ()
    failure: Failure | None = None
    is_retryable: bool = False
    mark: str = ""
    lost: bool = False
    outside: bool = False


def diagnose(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Diagnosis:
    """The findings; of what raises, the plain facts, and a hint that says so."""
    if verdict.status != "failed":
        return Diagnosis()
    errors: list[Exception] = []

    def found(find: Callable[[], _Found], otherwise: _Found) -> _Found:
        try:
            return find()
        except Exception as error:
            # a bug of ours: the run has failed by something else, and its users want to know by what
            errors.append(error)
            return otherwise

    problems = found(lambda: config_problems(plan, verdict), ())
    failure = found(lambda: find_failure(plan, verdict, traces), _plain_failure(plan, verdict, traces))
    retryable = found(lambda: is_retryable(plan, verdict, traces), False)
    mark, lost = found(lambda: mark_of(plan, verdict, traces), ""), found(lambda: is_lost(plan, verdict, traces), False)
    outside = found(lambda: is_outside_job(plan, verdict, traces), False) and not problems
    if errors:
        failure = dataclasses.replace(failure, hint=_hint(errors[0]))
    return Diagnosis(problems, None if problems else failure, retryable and not problems, mark, lost, outside)


def _plain_failure(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Failure:
    """What needs no reading of what the task left behind."""
    name = verdict.culprit or next(iter(verdict.silent), "")
    task = next((task for task in plan.tasks if str(task.task) == name), plan.tasks[0])
    code = traces.codes.get(name)
    ended = "failed" if code is None else f"ended with exit code {code}" if code >= 0 else f"killed by signal {-code}"
    return Failure(
        task=name,
        host=traces.hosts.get(name) or socket.gethostname(),
        reason={Cause.OVERDUE: "did not come up in time", Cause.STALLED: "made no progress"}.get(verdict.why, ended),
        detail=(),
        log=task.files.stderr_log,
    )


def _hint(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join([f"{type(error).__name__}:", *str(error).split()])
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"this failure could not be explained, by a bug in distlaunch; please report it: {text} ({where})"
