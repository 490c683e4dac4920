"""The outcome of an attempt, for commands and views."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distlaunch.base.errors import Problem
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.verdict import Verdict


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Attributes:
        failure: the description of the failure, if the attempt failed.
        problems: problems in the config that tasks found; then `failure` is None.
        warnings: messages about problems that did not make the attempt fail.
        retryable: True if a restart may help and nobody asked the job to stop.
        mark: identifies the exception or exit code and its step. A restart does not help if two attempts in a row have
            the same mark. Empty for other failures.
        lost: True if a task was killed, lost or frozen from outside.
        stopped_by: the first signal that asked the job to end, if any.
    """

    status: str
    exit_code: int
    failure: Failure | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    retryable: bool = False
    mark: str = ""
    lost: bool = False
    stopped_by: signal.Signals | None = None

    @property
    def code_of_command(self) -> int:
        """Return the exit code for commands other than `train` and `run`: 128 + the signal after a stop request."""
        is_stopped = self.status in ("interrupted", "stopped")
        return 128 + (self.stopped_by or signal.SIGTERM) if is_stopped else self.exit_code


MIN_WAITED_FRACTION = 0.1
"""Smallest fraction of the training time for which waiting for a task is reported as a warning."""


def attempt_warnings(
    plan: LaunchPlan, verdict: Verdict, given_up: Collection[str], waited_fractions: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the warnings about an attempt.

    Args:
        given_up: optional tasks that failed and were not restarted.
        waited_fractions: for each task, the fraction of the training time in which others waited for it.
    """
    logs = {str(task.task): task.files.stderr_log for task in plan.tasks}
    warnings = [f"{name} failed and was not restarted (its log: {logs[name]})" for name in given_up]
    warnings += [
        f"{name} failed after the run was {verdict.status} (its log: {logs[name]})" for name in verdict.failed_after_end
    ]
    limit = f"{plan.start_timeout_s:g} s after"
    warnings += [
        f"{name} was stopped because it was still running {limit} the other tasks had ended (--start-timeout)"
        if plan.mode == "run"
        else f"{name} was stopped because it reported nothing new for {limit} the end of the run: "
        "the last checkpoint may not be evaluated"
        for name in verdict.unfinished
    ]
    warnings += [
        f"the other tasks waited for {name} during {fraction:.0%} of the training time: "
        "its data, callbacks or checkpoints are slow"
        for name, fraction in waited_fractions.items()
        if fraction >= MIN_WAITED_FRACTION
    ]
    if verdict.status in ("done", "stopped", "interrupted"):
        warnings += [f"{name} did not exit in time and was killed" for name in verdict.late]
    return tuple(warnings)
