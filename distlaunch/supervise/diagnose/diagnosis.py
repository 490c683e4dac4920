"""Diagnoses a failed attempt: which task failed first, and why. If one part raises an error, the others are kept."""

from __future__ import annotations

import dataclasses
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from distlaunch.base.errors import Problem
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.diagnose.advice import advise, hint_for
from distlaunch.supervise.diagnose.exit_reason import (
    Failure,
    TaskError,
    explain_exit,
    is_from_outside,
    is_outside,
    last_lines,
    log_with_content,
    may_be_temporary,
    may_get_further,
    read_error,
    step_of,
)
from distlaunch.supervise.diagnose.user_frames import user_frame
from distlaunch.supervise.state import MAX_FAILED_STARTS, Cause
from distlaunch.supervise.verdict import Verdict

_Found = TypeVar("_Found")
EXIT_MARK = "exit code "


@dataclass(frozen=True)
class Diagnosis:
    """The part of an `Outcome` about a failure.

    Attributes:
        is_retryable: as `retryable` of `Outcome`, but without regard to stop requests.
        outside: True if the cause is proven to be outside the job, so that a later try may succeed.
    """

    problems: tuple[Problem, ...] = ()
    failure: Failure | None = None
    is_retryable: bool = False
    mark: str = ""
    lost: bool = False
    outside: bool = False


def diagnose(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Diagnosis:
    """Return the diagnosis of a failure. If a part of it raises, use the plain facts and a hint about the error."""
    if verdict.status != "failed":
        return Diagnosis()
    errors: list[Exception] = []

    def attempt(find: Callable[[], _Found], fallback: _Found) -> _Found:
        try:
            return find()
        except Exception as error:
            # a bug in distlaunch must not hide why the run has failed
            errors.append(error)
            return fallback

    problems = attempt(lambda: config_problems(plan, verdict), ())
    failure = attempt(lambda: find_failure(plan, verdict, traces), _plain_failure(plan, verdict, traces))
    retryable = attempt(lambda: is_retryable(plan, verdict, traces), False)
    mark = attempt(lambda: failure_mark(plan, verdict, traces), "")
    lost = attempt(lambda: is_lost(plan, verdict, traces), False)
    outside = attempt(lambda: is_outside_job(plan, verdict, traces), False) and not problems
    if errors:
        failure = dataclasses.replace(failure, hint=_hint_about_bug(errors[0]))
    return Diagnosis(problems, None if problems else failure, retryable and not problems, mark, lost, outside)


def _plain_failure(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Failure:
    """Return the failure from the facts alone, without reading files of the task."""
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


def _hint_about_bug(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join([f"{type(error).__name__}:", *str(error).split()])
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"this failure could not be explained because of a bug in distlaunch; please report it: {text} ({where})"


@dataclass
class Traces:
    """Observations of the processes in addition to the facts, by the name of the task.

    Attributes:
        codes: the exit code of each process that has ended.
        suspended: whether a process was suspended when the others were asked to stop. Only for processes that still
            ran at that time.
        beating: whether each of these processes had sent a heartbeat shortly before that time.
        hosts: the host that each task reported.
        spawn_errors: why a process could not be started.
        steps: the step of each task when the run stalled.
        last_steps: the last step that each task has reported.
        ooms: whether the kernel's OOM killer ended the process; None if unknown.
    """

    codes: dict[str, int] = field(default_factory=dict)
    suspended: dict[str, bool] = field(default_factory=dict)
    beating: dict[str, bool] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict[str, str])
    spawn_errors: dict[str, str] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict[str, int])
    last_steps: dict[str, int | None] = field(default_factory=dict)
    ooms: dict[str, bool | None] = field(default_factory=dict)


def config_problems(plan: LaunchPlan, verdict: Verdict) -> tuple[Problem, ...]:
    """Return the distinct config problems that tasks reported; empty if the culprit failed for another reason."""
    error = _error_of(plan, verdict)
    if error is None or not error.problems:
        return ()
    found: dict[Problem, None] = {}
    # all tasks build the same config, but each may have found different problems
    for task in plan.tasks:
        if other := read_error(task.files):
            found.update(dict.fromkeys(other.problems))
    return tuple(found)


def is_retryable(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> bool:
    """Return True if a retry may help: the attempt lost a task, hung, or failed in the middle of training."""
    # the tasks of other launchers would have to restart at the same moment
    if verdict.unready or plan.elsewhere:
        return False
    if verdict.why in (Cause.STALLED, Cause.OVERDUE):
        return True
    if verdict.why is not Cause.FAILURE or verdict.culprit is None or verdict.culprit in traces.spawn_errors:
        return False
    if is_lost(plan, verdict, traces):
        return True
    error, reports_steps = _error_of(plan, verdict), plan.mode != "run"
    if error is None:
        code = traces.codes.get(verdict.culprit)
        return may_get_further(code, traces.last_steps.get(str(verdict.culprit)), reports_steps=reports_steps)
    return may_be_temporary(error, reports_steps=reports_steps)


def is_lost(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> bool:
    """Return True if a task hung, or ended for a reason that seems to be outside its program."""
    if verdict.culprit is None:
        return False
    return verdict.why is Cause.STALLED or is_outside(traces.codes.get(verdict.culprit), _error_of(plan, verdict))


def is_outside_job(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> bool:
    """Return True if the cause is proven to be outside the job, so that the same command may succeed later.

    This is stricter than `is_lost`, which means only that a restart is worth a try. A task that hangs may hang again,
    and the error of a task that has lost a peer does not prove why the peer is gone.
    """
    culprit = str(verdict.culprit)
    if culprit in verdict.late or verdict.unready or culprit in traces.spawn_errors:
        return False
    if verdict.why is Cause.OVERDUE:
        # if all tasks came up, the job itself may be what delays the first step
        return bool(plan.elsewhere or verdict.silent)
    if verdict.why is Cause.STALLED:
        return verdict.frozen and traces.suspended.get(culprit, False)
    if verdict.why is not Cause.FAILURE or verdict.culprit is None:
        return False
    error = _error_of(plan, verdict)
    if error is None or not error.consequence:
        return is_from_outside(traces.codes.get(culprit), error, oom=traces.ooms.get(culprit))
    if verdict.left:
        return False
    if plan.elsewhere or any(traces.suspended.get(name, False) for name in verdict.silent):
        return True
    # if all of these tasks still run, the network between them has failed
    return error.is_heartbeat_loss and (
        (len(verdict.silent) == 1 and _runs_on_other_host(verdict.silent[0], culprit, traces))
        or (not verdict.silent and bool(_peers_without_heartbeats(_task_of(plan, culprit), plan, traces)))
    )


def _task_of(plan: LaunchPlan, name: str) -> TaskPlan:
    return next(task for task in plan.tasks if str(task.task) == name)


def failure_mark(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> str:
    """Return a text that identifies an exception or exit, to detect a repeated failure; empty for other failures."""
    if verdict.why is not Cause.FAILURE:
        return ""
    if (error := _error_of(plan, verdict)) is not None:
        return error.mark
    step = traces.last_steps.get(str(verdict.culprit))
    if step is None or is_lost(plan, verdict, traces):  # the progress of a script is unknown
        return ""
    return f"{EXIT_MARK}{traces.codes.get(str(verdict.culprit))} at step {step}"


def _error_of(plan: LaunchPlan, verdict: Verdict) -> TaskError | None:
    culprit = _culprit(plan, verdict)
    return None if culprit is None else read_error(culprit.files)


def _culprit(plan: LaunchPlan, verdict: Verdict) -> TaskPlan | None:
    return next((task for task in plan.tasks if str(task.task) == verdict.culprit), None)


def find_failure(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Failure:
    """Return the failure of a failed attempt."""
    culprit, error = str(verdict.culprit), _error_of(plan, verdict)
    advice = advise(
        verdict.why,
        error,
        traces.codes.get(culprit),
        start_timeout_s=plan.start_timeout_s,
        stall_timeout_s=plan.stall_timeout_s,
        stop_timeout_s=plan.stop_timeout_s,
        oom=traces.ooms.get(culprit),
        late=culprit in verdict.late,
        unstartable=culprit in traces.spawn_errors,
        hosts=len({task.host for task in plan.tasks}) > 1,
    )
    finding = _find(plan, verdict, traces)
    finding = dataclasses.replace(finding, first=advice.first, resumable=advice.resume)
    # a script may have been written for an older Keras
    is_script = plan.mode == "run" and verdict.why is Cause.FAILURE
    return dataclasses.replace(finding, hint=hint_for(error)) if is_script else finding


def _find(plan: LaunchPlan, verdict: Verdict, traces: Traces) -> Failure:
    tasks = {str(task.task): task for task in plan.tasks}
    if verdict.why is Cause.OVERDUE:
        return _overdue(plan, verdict, traces, tasks)
    if verdict.why is Cause.STALLED:
        return _stalled(plan, verdict, traces, tasks)
    assert verdict.culprit is not None
    culprit = tasks[verdict.culprit]
    # check this before reading error.json: an error that the task wrote while it was stopped is not the cause
    if verdict.culprit in verdict.late:
        lost = "; the last checkpoint is from before that" if plan.mode != "run" else ""
        reason = f"did not stop within {plan.stop_timeout_s:g} s and was killed{lost}"
        return _finding(culprit, reason, traces)
    if verdict.culprit in traces.spawn_errors:
        return _finding(culprit, f"could not be started: {traces.spawn_errors[verdict.culprit]}", traces)
    error = read_error(culprit.files)
    reason = explain_exit(traces.codes.get(verdict.culprit), error, oom=traces.ooms.get(str(verdict.culprit)))
    if verdict.unready:
        return _finding(
            culprit, f"ended {MAX_FAILED_STARTS} times in a row before it was up; the last time: {reason}", traces
        )
    if plan.elsewhere and error is not None and error.consequence:
        finding = _finding(culprit, f"{_missing_task(plan.elsewhere)}; {verdict.culprit} noticed it: {reason}", traces)
        # the traceback is from the task that noticed the loss, and does not explain why the other task is gone
        return dataclasses.replace(finding, detail=())
    if verdict.left:
        names = _join(_first(verdict.left))
        reason = f"{names} had ended with exit code 0, and {verdict.culprit} was not done: {reason}"
        return _finding(culprit, reason, traces)
    silent_names = list(verdict.silent)
    if not silent_names:
        is_heartbeat_loss = error is not None and error.is_heartbeat_loss
        peers = _peers_without_heartbeats(culprit, plan, traces) if is_heartbeat_loss else ""
        network = f"and {peers} no longer reached each other, although all were running: " if peers else ""
        return _finding(culprit, f"{network}{reason}", traces)
    if len(silent_names) > 1:
        return _finding(
            culprit, f"{reason}. Its peers {', '.join(silent_names)} neither failed nor answered it", traces
        )
    silent = tasks[silent_names[0]]
    if error is not None and error.is_heartbeat_loss and _runs_on_other_host(silent_names[0], verdict.culprit, traces):
        where = f"{verdict.culprit} on {traces.hosts.get(verdict.culprit)}"
        return _finding(silent, f"was running, but {where} no longer got its heartbeats: {reason}", traces)
    stopped = " (its process is suspended, as by SIGSTOP)" if traces.suspended.get(silent_names[0]) else ""
    return _finding(silent, f"stopped answering{stopped}; {verdict.culprit} noticed it: {reason}", traces)


def _runs_on_other_host(task: str, noticed_by: str, traces: Traces) -> bool:
    """Return True if the silent task still runs on another host, so that the network between them has failed."""
    is_alive = traces.beating.get(task, False) and not traces.suspended.get(task, False)
    return is_alive and traces.hosts.get(task) != traces.hosts.get(noticed_by)


def _peers_without_heartbeats(culprit: TaskPlan, plan: LaunchPlan, traces: Traces) -> str:
    """Return the names of the peers if all of them reported missing heartbeats, else an empty string."""
    peers = [task for task in plan.tasks if task.address and task is not culprit]
    errors = [read_error(task.files) for task in peers]
    if not peers or not all(error is not None and error.is_heartbeat_loss for error in errors):
        return ""
    hosts = [traces.hosts.get(str(task.task), "") for task in peers]
    return _join(_first([f"{task.task} on {host}" for task, host in zip(peers, hosts, strict=True)]))


def _overdue(plan: LaunchPlan, verdict: Verdict, traces: Traces, tasks: Mapping[str, TaskPlan]) -> Failure:
    option = "--start-timeout" if plan.mode == "run" else "cluster.start_timeout_s"
    limit = f"within {plan.start_timeout_s:g} s ({option})"
    if verdict.silent:
        names = [
            name + (f" ({tasks[name].address})" if name in tasks and tasks[name].address else "")
            for name in _first(verdict.silent)
        ]
        return _finding(tasks[verdict.silent[0]], f"{_join(names)} did not come up {limit}", traces)
    if plan.elsewhere:
        others = _join(_addresses(plan.elsewhere))
        reason = f"the first step did not begin {limit}; it waits for tasks of other launchers: {others}"
    else:
        reason = f"every task came up, but the first step did not begin {limit}; the logs show where each task was"
    # the log ends with the requested stacks, which are too long for the screen
    return dataclasses.replace(_finding(plan.tasks[0], reason, traces), detail=())


def _stalled(plan: LaunchPlan, verdict: Verdict, traces: Traces, tasks: Mapping[str, TaskPlan]) -> Failure:
    option = "--stall-timeout" if plan.mode == "run" else "cluster.stall_timeout_s"
    limit = f"for {plan.stall_timeout_s:g} s ({option})"
    if verdict.culprit is None:
        reason = f"no task made progress {limit}; all wait for each other, and their logs have the stacks"
        return dataclasses.replace(_finding(plan.tasks[0], reason, traces), task="", detail=())
    culprit = tasks[verdict.culprit]
    step = traces.steps.get(verdict.culprit)
    where = "" if step is None else f" after step {step}"
    if verdict.frozen:
        stopped = " (its process is suspended, as by SIGSTOP)" if traces.suspended.get(verdict.culprit) else ""
        reason = f"sent no heartbeat{stopped} {limit}{where}"
    else:
        others = " while the others waited for it" if len(plan.tasks) > 1 else ""
        reason = f"made no progress {limit}{where}{others}; its log has the stacks"
    return dataclasses.replace(_finding(culprit, reason, traces), detail=())


def _missing_task(elsewhere: Mapping[str, str]) -> str:
    """Describe the lost task. A launcher does not know which of several tasks of other launchers is gone."""
    tasks = _addresses(elsewhere)
    if len(tasks) == 1:
        return f"{tasks[0]}, a task of another launcher, is gone"
    return f"a task of another launcher is gone: {_join(tasks, 'or')}"


def _addresses(elsewhere: Mapping[str, str]) -> list[str]:
    return [f"{task} at {address}" for task, address in elsewhere.items()]


def _finding(task: TaskPlan, reason: str, traces: Traces) -> Failure:
    error, name = read_error(task.files), str(task.task)
    detail = last_lines(task.files, error)
    return Failure(
        task=name,
        host=traces.hosts.get(name) or (error.host if error else "") or socket.gethostname(),
        reason=reason,
        detail=detail,
        log=log_with_content(task.files),
        user_error=bool(error and error.user_error),
        step=step_of(task.files),
        # an error of the user has no detail, but may have a traceback
        place=user_frame(detail or (error.traceback.splitlines() if error else ())),
    )


def _first(names: Sequence[str], most: int = 8) -> list[str]:
    """Return up to `most` names, followed by the number of the others."""
    return list(names) if len(names) <= most else [*names[:most], f"{len(names) - most:,} more"]


def _join(names: list[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
