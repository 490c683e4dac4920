"""The verdict on how a run's processes ended, as a pure function of the history."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import ErrorReported, ErrorRole, Exited, Fact, Rules
from distlaunch.supervise.state import MAX_FAILED_STARTS, Cause, RunState, is_failure, reasons


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        status: the status in RunEnded.
        culprit: the task that failed first.
        frozen: True if the culprit sent no heartbeats.
        unready: True if the culprit has ended several times in a row before it came up.
        left: tasks that had ended with exit code 0 before the culprit reported a lost peer.
        silent: tasks that neither ended nor reported an error, although the culprit reported a lost peer; or tasks that
            did not come up in time.
        late: tasks that were killed because they did not stop in time.
        failed_after_end: tasks that failed although the run completed.
        unfinished: optional tasks that were stopped because they took too long after the end of the run.
    """

    status: str
    exit_code: ExitCode
    why: Cause
    culprit: str | None = None
    frozen: bool = False
    unready: bool = False
    left: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed_after_end: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


def conclude(history: Sequence[Fact], now: float, rules: Rules) -> Verdict:
    """Return how the run ended. Call this function when a decision has `over=True`."""
    state = RunState.of(history)
    due = [reason for reason in reasons(state, rules) if reason[0] <= now]
    why = due[0][1] if due else Cause.NOTHING
    late = _killed_tasks(state)
    # a failure before Ctrl-C stays a failure
    if state.signals and state.signals[0].number == signal.SIGINT and why is Cause.INTERRUPT:
        if _all_done(state, rules):
            return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late)
        return _interrupted(state, why, late)
    if why is Cause.FAILURE:
        if _chief_closed_first(state, rules):
            return _verdict_after_close(state, rules, late)
        culprit, silent = _find_culprit(state, rules, since=due[0][0])
        unready = culprit in rules.replaceable and state.failed_starts.get(str(culprit), 0) >= MAX_FAILED_STARTS
        left = _find_left(culprit, state, rules) if not silent else ()
        return Verdict("failed", ExitCode.FAILED, why, culprit=culprit, unready=unready, left=left, silent=silent)
    if why is Cause.STALLED:
        held_up = next(fact for fact in state.stalled.values() if fact.task not in rules.replaceable)
        return Verdict("failed", ExitCode.FAILED, why, culprit=held_up.task or None, frozen=held_up.frozen)
    if why is Cause.OVERDUE:
        # restarted tasks have been up before
        not_missing = state.restarted | rules.optional | state.ready
        missing = tuple(state.absent) or tuple(task for task in state.spawned if task not in not_missing)
        return Verdict("failed", ExitCode.FAILED, why, silent=missing)
    if why in (Cause.TERMINATE, Cause.STOPPED):
        return _stopped(state, rules, why, late)
    failed = _failed_after_end(state, (ExitCode.DONE,))
    unfinished = tuple(task for task in state.termed if task in rules.optional and not state.signals)
    late = tuple(task for task in late if task not in unfinished)
    return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late, failed_after_end=failed, unfinished=unfinished)


def _chief_closed_first(state: RunState, rules: Rules) -> bool:
    """Return True if a task was lost or crashed only after the chief had reported the end of the run."""
    if not rules.needs_finish or rules.chief not in state.closed:
        return False
    if rules.chief in state.finished or rules.needs_every_task:  # in lockstep, the chief cannot close after a loss
        return True
    return state.closed[rules.chief] < _stopped_at(rules.chief, state)


def _verdict_after_close(state: RunState, rules: Rules, late: tuple[str, ...]) -> Verdict:
    """Return the verdict after the chief has reported the end of the run, however the others ended."""
    failed = _failed_after_end(state, (ExitCode.DONE, *rules.preempted))
    if rules.chief in state.finished:
        return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late, failed_after_end=failed)
    return Verdict("stopped", ExitCode.PREEMPTED, Cause.STOPPED, late=late, failed_after_end=failed)


def _failed_after_end(state: RunState, good: tuple[int, ...]) -> tuple[str, ...]:
    ends = [end for end in state.exits.values() if end.code not in good and end.task not in state.given_up]
    return tuple(end.task for end in ends if end.at < _stopped_at(end.task, state))


def _interrupted(state: RunState, why: Cause, late: tuple[str, ...]) -> Verdict:
    # a second Ctrl-C, or one after SIGTERM, asks for a kill
    asked_once = len(state.signals) == 1
    return Verdict("interrupted", ExitCode.PREEMPTED, why, late=late if asked_once else ())


def _stopped(state: RunState, rules: Rules, why: Cause, late: tuple[str, ...]) -> Verdict:
    # optional tasks may have ended long ago
    ends = [end.at for end in state.exits.values() if end.task not in rules.optional]
    asked_at = next((fact.at for fact in state.signals), min(ends, default=0.0))
    if _all_done(state, rules):
        return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late)
    if any(fact.number == signal.SIGINT for fact in state.signals):
        return _interrupted(state, why, late)
    if rules.needs_finish and rules.chief in state.closed:
        return _verdict_after_close(state, rules, late)
    trained = state.training_at is not None and state.training_at <= asked_at
    if not trained and not rules.scripts:
        return Verdict("stopped", ExitCode.PREEMPTED, why, late=late)
    # servers and the evaluator have nothing to save
    savers = [task for task in state.spawned if task not in rules.servers | rules.optional]
    bad = [end for end in state.exits.values() if is_failure(end, state, rules)]
    if not bad and not any(task in state.alive for task in savers):
        return Verdict("stopped", ExitCode.PREEMPTED, why)
    failed = [end.task for end in bad if end.task not in late]
    culprit = failed[0] if failed else next((task for task in late if task in savers), None)
    return Verdict("failed", ExitCode.FAILED, why, culprit=culprit, late=late)


def _all_done(state: RunState, rules: Rules) -> bool:
    """Return True if the run reached its planned end although it was asked to stop."""
    if rules.needs_finish:
        return rules.chief in state.finished
    if state.alive:
        return False
    needed = [
        end for end in state.exits.values() if not rules.scripts or end.task not in rules.servers | rules.optional
    ]
    return all(end.code == ExitCode.DONE for end in needed)


def _stopped_at(task: str, state: RunState) -> float:
    """Return when the task was asked to end or killed."""
    return min(state.termed.get(task, float("inf")), state.killed.get(task, float("inf")))


def _killed_tasks(state: RunState) -> tuple[str, ...]:
    """Return the tasks that the launcher killed before they had ended."""

    def was_killed(task: str) -> bool:
        killed_at, end = state.killed.get(task), state.exits.get(task)
        return killed_at is not None and (end is None or end.at >= killed_at)

    return tuple(task for task in state.spawned if was_killed(task))


def _find_culprit(state: RunState, rules: Rules, since: float) -> tuple[str | None, tuple[str, ...]]:
    """Return the task that failed first, and the silent tasks if that task only reports a lost peer.

    Args:
        since: time of the first failure. Stop requests before it are ignored.
    """
    stop_times = [at for at in (*state.termed.values(), *state.killed.values()) if at >= since]
    # errors after this time are consequences of the launcher's own stop requests
    horizon = min(stop_times, default=float("inf"))
    errors = {task: fact for task, fact in state.errors.items() if fact.at <= horizon and _can_fail(task, state, rules)}
    ends = {
        task: end
        for task, end in state.exits.items()
        if end.at <= horizon and (is_failure(end, state, rules) or task in errors)
    }
    # a cause outranks an earlier consequence, since the cause must have come first
    ranked = sorted(dict.fromkeys([*ends, *errors]), key=lambda task: _rank(ends.get(task), errors.get(task)))
    if not ranked:
        return None, ()
    first = ranked[0]
    error = errors.get(first)
    if error is None or error.role is not ErrorRole.CONSEQUENCE:
        return first, ()
    gone = {task for task, end in state.exits.items() if end.at <= horizon} | rules.optional
    return first, tuple(task for task in state.spawned if task not in gone and task not in errors)


def _find_left(culprit: str | None, state: RunState, rules: Rules) -> tuple[str, ...]:
    """Return the scripts that had ended successfully before the culprit reported a lost peer."""
    error = state.errors.get(str(culprit))
    if not rules.scripts or error is None or error.role is not ErrorRole.CONSEQUENCE:
        return ()
    ends = [end for end in state.exits.values() if end.code == ExitCode.DONE and end.at <= error.at]
    return tuple(end.task for end in ends if end.task not in rules.optional)


def _can_fail(task: str, state: RunState, rules: Rules) -> bool:
    """Return True if an error of the task can make the run fail. Replaceable tasks are restarted after a lost peer."""
    if task in rules.optional:
        return False
    error = state.errors[task].role
    return task not in rules.replaceable or error is not ErrorRole.CONSEQUENCE


def _rank(end: Exited | None, error: ErrorReported | None) -> tuple[int, float]:
    order = {ErrorRole.CONFIG: 0, ErrorRole.CAUSE: 1, ErrorRole.CONSEQUENCE: 2}
    at = min(fact.at for fact in (end, error) if fact is not None)
    # an end without an error counts as a cause: a killed task cannot report an error
    return (order[error.role] if error else 1), at
