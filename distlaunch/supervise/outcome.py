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
        failure: the finding, if it failed.
        problems: mistakes in the config that tasks found while building; then `failure` is None.
        warnings: what went wrong without making the attempt fail.
        retryable: it failed for a reason that need not come again, and nobody asked to stop.
        mark: of an exception or an exit: what it was, and at which step. The same twice in a row will come again.
        lost: it failed since a task was killed, lost or frozen, not by an exception of its own.
        stopped_by: the signal that asked it to end first; None: none did.
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
        """Return the exit code of a command other than `train` and `run`: 128 + the signal if it was stopped."""
        is_stopped = self.status in ("interrupted", "stopped")
        return 128 + (self.stopped_by or signal.SIGTERM) if is_stopped else self.exit_code


SLOW_SHARE = 0.1
"""Share of training time; a task that others wait for longer than that is worth a warning."""


def warnings_of(
    plan: LaunchPlan, verdict: Verdict, given_up: Collection[str], waited: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the warnings about an attempt.

    Args:
        waited: for each task, the share of training time in which others waited for it.
    """
    logs = {str(task.task): task.files.stderr_log for task in plan.tasks}
    warnings = [f"{name} failed and was not started again (its log: {logs[name]})" for name in given_up]
    warnings += [
        f"{name} ended badly after the run was {verdict.status} (its log: {logs[name]})" for name in verdict.odd
    ]
    limit = f"{plan.start_timeout_s:g} s after"
    warnings += [
        f"{name} had not ended {limit} the others (--start-timeout) and was ended"
        if plan.mode == "run"
        else f"{name} reported nothing new for {limit} the run was done and was ended: "
        "the last checkpoint may not be evaluated"
        for name in verdict.unfinished
    ]
    warnings += [
        f"the others waited for {name} in {share:.0%} of the training time: its data, callbacks or checkpoints are slow"
        for name, share in waited.items()
        if share >= SLOW_SHARE
    ]
    if verdict.status in ("done", "stopped"):
        warnings += [f"{name} did not end by itself and was killed" for name in verdict.late]
    return tuple(warnings)
