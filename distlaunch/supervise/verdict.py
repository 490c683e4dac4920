"""The verdict on how a run's processes ended, as a pure function of the history."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import ErrorReported, ErrorRole, Exited, Fact, Rules
from distlaunch.supervise.state import TRIES, Cause, RunState, is_failure, reasons


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        status: as in RunEnded.
        culprit: the task that failed first.
        frozen: the culprit showed no sign of life.
        unready: the culprit has ended several times in a row before it had come up.
        left: tasks that had ended with exit code 0 before the culprit reported a lost peer.
        silent: tasks that neither failed nor answered when the culprit reported a lost peer.
        late: tasks that had to be killed because they did not stop in time.
        odd: tasks that failed although the run completed.
        unfinished: tasks beside the run that were ended because they took too long after its end.
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
    odd: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


def conclude(history: Sequence[Fact], now: float, rules: Rules) -> Verdict:
    """Return how the run ended. Call it when `decide` says that it is over."""
    state = RunState.of(history)
    due = [reason for reason in reasons(state, rules) if reason[0] <= now]
    why = due[0][1] if due else Cause.NOTHING
    late = _late(state)
    # only if nothing else came first: a failure before Ctrl-C stays a failure
    if state.signals and state.signals[0].number == signal.SIGINT and why is Cause.INTERRUPT:
        if _all_done(state, rules):
            return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late)
        return Verdict("interrupted", ExitCode.PREEMPTED, why, late=late)
    if why is Cause.FAILURE:
        if _had_closed(state, rules):
            return _closed(state, rules, late)
        culprit, silent = _culprit(state, rules, since=due[0][0])
        unready = culprit in rules.replaceable and state.failed_starts.get(str(culprit), 0) >= TRIES
        left = _left(culprit, state, rules) if not silent else ()
        return Verdict("failed", ExitCode.FAILED, why, culprit=culprit, unready=unready, left=left, silent=silent)
    if why is Cause.STALLED:
        held_up = next(fact for fact in state.stalled.values() if fact.task not in rules.replaceable)
        return Verdict("failed", ExitCode.FAILED, why, culprit=held_up.task or None, frozen=held_up.frozen)
    if why is Cause.OVERDUE:
        # who was started again, had come before
        late_comers = state.restarted | rules.optional | state.ready
        missing = tuple(state.absent) or tuple(task for task in state.spawned if task not in late_comers)
        return Verdict("failed", ExitCode.FAILED, why, silent=missing)
    if why in (Cause.TERMINATE, Cause.STOPPED):
        return _stopped(state, rules, why, late)
    odd = _odd(state, (ExitCode.DONE,))
    unfinished = tuple(task for task in state.termed if task in rules.optional and not state.signals)
    late = tuple(task for task in late if task not in unfinished)
    return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late, odd=odd, unfinished=unfinished)


def _had_closed(state: RunState, rules: Rules) -> bool:
    """Return True if another task was lost or crashed after the run had reached its end or was asked to stop."""
    if not rules.needs_finish or rules.chief not in state.closed:
        return False
    if rules.chief in state.finished or rules.needs_every_task:  # together with one that is gone none could have closed
        return True
    return state.closed[rules.chief] < _stopped_at(rules.chief, state)


def _closed(state: RunState, rules: Rules, late: tuple[str, ...]) -> Verdict:
    """Return the verdict after the chief has reported the end of the run, however the others ended."""
    odd = _odd(state, (ExitCode.DONE, *rules.preempted))
    if rules.chief in state.finished:
        return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late, odd=odd)
    return Verdict("stopped", ExitCode.PREEMPTED, Cause.STOPPED, late=late, odd=odd)


def _odd(state: RunState, good: tuple[int, ...]) -> tuple[str, ...]:
    ends = [end for end in state.exits.values() if end.code not in good and end.task not in state.given_up]
    return tuple(end.task for end in ends if end.at < _stopped_at(end.task, state))


def _stopped(state: RunState, rules: Rules, why: Cause, late: tuple[str, ...]) -> Verdict:
    # whoever is beside the run may have ended long ago
    ends = [end.at for end in state.exits.values() if end.task not in rules.optional]
    asked_at = next((fact.at for fact in state.signals), min(ends, default=0.0))
    if _all_done(state, rules):
        return Verdict("done", ExitCode.DONE, Cause.NOTHING, late=late)
    if any(fact.number == signal.SIGINT for fact in state.signals):
        return Verdict("interrupted", ExitCode.PREEMPTED, why, late=late)
    if rules.needs_finish and rules.chief in state.closed:
        return _closed(state, rules, late)
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
    """Return when the task was asked to end."""
    return min(state.termed.get(task, float("inf")), state.killed.get(task, float("inf")))


def _late(state: RunState) -> tuple[str, ...]:
    def was_killed(task: str) -> bool:
        killed_at, end = state.killed.get(task), state.exits.get(task)
        return killed_at is not None and (end is None or end.at >= killed_at)

    return tuple(task for task in state.spawned if was_killed(task))


def _culprit(state: RunState, rules: Rules, since: float) -> tuple[str | None, tuple[str, ...]]:
    """Return the task that failed first, and the silent task if only a loss is known.

    Args:
        since: time of the first failure; tasks that were signalled before do not count.
    """
    stop_times = [at for at in (*state.termed.values(), *state.killed.values()) if at >= since]
    # what happens after the others were stopped is our own doing
    horizon = min(stop_times, default=float("inf"))
    errors = {task: fact for task, fact in state.errors.items() if fact.at <= horizon and _can_fail(task, state, rules)}
    ends = {
        task: end
        for task, end in state.exits.items()
        if end.at <= horizon and (is_failure(end, state, rules) or task in errors)
    }
    # a cause outranks an earlier consequence: who says what went wrong has failed first
    ranked = sorted(dict.fromkeys([*ends, *errors]), key=lambda task: _rank(ends.get(task), errors.get(task)))
    if not ranked:
        return None, ()
    first = ranked[0]
    error = errors.get(first)
    if error is None or error.role is not ErrorRole.CONSEQUENCE:
        return first, ()
    gone = {task for task, end in state.exits.items() if end.at <= horizon} | rules.optional
    return first, tuple(task for task in state.spawned if task not in gone and task not in errors)


def _left(culprit: str | None, state: RunState, rules: Rules) -> tuple[str, ...]:
    """Return scripts that had ended before the culprit reported a lost peer."""
    error = state.errors.get(str(culprit))
    if not rules.scripts or error is None or error.role is not ErrorRole.CONSEQUENCE:
        return ()
    ends = [end for end in state.exits.values() if end.code == ExitCode.DONE and end.at <= error.at]
    return tuple(end.task for end in ends if end.task not in rules.optional)


def _can_fail(task: str, state: RunState, rules: Rules) -> bool:
    """Return True if the failure of the task can be that of the run; a replaceable task fails for itself."""
    if task in rules.optional:
        return False
    error = state.errors[task].role
    return task not in rules.replaceable or error is not ErrorRole.CONSEQUENCE


def _rank(end: Exited | None, error: ErrorReported | None) -> tuple[int, float]:
    order = {ErrorRole.CONFIG: 0, ErrorRole.CAUSE: 1, ErrorRole.CONSEQUENCE: 2}
    at = min(fact.at for fact in (end, error) if fact is not None)
    # an end without a word ranks with causes: a killed task can say nothing
    return (order[error.role] if error else 1), at
