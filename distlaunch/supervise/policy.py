"""Pure functions that decide what to do about a run's processes. `verdict` decides how the run has ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import Exited, Rules
from distlaunch.supervise.state import (
    Cause,
    RunState,
    TimedReason,
    has_ended_well,
    is_failure,
    is_hopeless,
    linger_until,
    needs_restart,
    reasons,
)

SETTLE_S = 0.7
"""Seconds to wait after a failure for reports of earlier failures. A SIGKILL needs no wait: it is never the consequence
of another task's failure."""
FAILURE_STOP_S = 5.0
"""Seconds for tasks to end if there is nothing to save: a peer has failed, or the first step was never reached."""
LOCKSTEP_STOP_S = 0.5
"""Seconds for tasks that train in lockstep to end after a failure. Most of them hang in a call to the lost task."""
DUMP_S = 0.5
"""Seconds for tasks to write their stacks before they are stopped because the job hangs or took no first step."""
REPEAT_S = 0.3
"""A second Ctrl-C within these seconds is a duplicate of the first (from the terminal and from `uv run`)."""
GIVE_UP_S = 10.0
"""Seconds to wait for a process after SIGKILL. A process that still exists then is blocked in the kernel."""

_NEVER = float("inf")


@dataclass(frozen=True)
class Decision:
    """A decision about a run.

    Attributes:
        send: the order to send.
        to: the tasks to send it to; empty for every remaining task.
        respawn: tasks to restart.
        give_up: tasks that are not restarted and without which the run continues.
        awaits: tasks that still work after the end of the run and may finish their work.
        wake_at: when to decide again if nothing happens before.
        over: True if nothing is left to wait for.
    """

    why: Cause
    send: Order | None = None
    to: tuple[str, ...] = ()
    respawn: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    wake_at: float | None = None
    over: bool = False


@dataclass(frozen=True)
class _Times:
    """The times at which a task is asked to end, and killed."""

    term_at: float
    kill_at: float


def decide(state: RunState, now: float, rules: Rules) -> Decision:
    """Decide what to do now, given what has happened."""
    found = reasons(state, rules)
    due = [reason for reason in found if reason[0] <= now]
    # while the job is being stopped, tasks are not restarted
    if not due and (decision := _restart_or_give_up(state, rules)) is not None:
        return decision
    # a stalled task that is no reason to stop is replaceable: it is killed, and restarted when its end is noticed
    if not due and (frozen := [task for task in state.stalled if task not in {*state.exits, *state.killed}]):
        return Decision(Cause.STALLED, send=Order.KILL, to=tuple(frozen))
    # all tasks have ended, with or without a reason to stop
    if not state.alive:
        return Decision(due[0][1] if due else Cause.NOTHING, over=True)
    awaits = _awaited(state, rules) if not state.signals else ()
    if not due:
        return Decision(Cause.NOTHING, awaits=awaits, wake_at=found[0][0] if found else None)
    return _stop(state, now, due[0][1], _schedule(state, due, rules), awaits)


def _restart_or_give_up(state: RunState, rules: Rules) -> Decision | None:
    """Return the tasks to restart or give up; None if there are none, or the chief has reported its end or is gone."""
    if rules.chief in state.closed:
        return None
    ends = [end for end in state.exits.values() if end.task not in state.given_up]
    respawn = tuple(end.task for end in ends if needs_restart(end, state, rules))
    if rules.chief in state.exits and rules.chief not in respawn:
        return None
    give_up = tuple(end.task for end in ends if end.task in rules.optional and _has_failed_for_good(end, state, rules))
    return Decision(Cause.NOTHING, respawn=respawn, give_up=give_up) if respawn or give_up else None


def _has_failed_for_good(end: Exited, state: RunState, rules: Rules) -> bool:
    """Return True if an optional task has failed and a restart would not help."""
    if rules.scripts:
        return end.code != ExitCode.DONE and not needs_restart(end, state, rules)
    return is_hopeless(end.task, state)


def _awaited(state: RunState, rules: Rules) -> tuple[str, ...]:
    if not has_ended_well(state, rules):
        return ()
    return tuple(task for task in state.alive if task in rules.optional and task not in state.termed)


def _stop(state: RunState, now: float, why: Cause, times: dict[str, _Times], awaits: tuple[str, ...]) -> Decision:
    """Decide which tasks to ask to end or to kill now."""
    killed, termed = state.killed, state.termed
    kill = [task for task, at in times.items() if task not in killed and now >= at.kill_at]
    if kill:
        return Decision(why, send=Order.KILL, to=_targets(kill, state))
    term = [task for task, at in times.items() if task not in termed and task not in killed and now >= at.term_at]
    if term:
        return Decision(why, send=Order.STOP, to=_targets(term, state))
    if why in (Cause.OVERDUE, Cause.STALLED) and state.dumped_at is None:
        return Decision(why, send=Order.DUMP)
    wakes = [
        killed[task] + GIVE_UP_S if task in killed else at.kill_at if task in termed else min(at.term_at, at.kill_at)
        for task, at in times.items()
    ]
    over = all(task in killed and now >= killed[task] + GIVE_UP_S for task in times)
    return Decision(why, awaits=awaits, wake_at=min(wakes), over=over)


def _targets(tasks: list[str], state: RunState) -> tuple[str, ...]:
    return () if tasks == state.alive else tuple(tasks)


def _schedule(state: RunState, due: Sequence[TimedReason], rules: Rules) -> dict[str, _Times]:
    """Return when to stop and kill each remaining task, given the reasons."""
    (at, why), *others = due
    # a stop request shortens the times even if another reason came first
    asked = [(other_at, other) for other_at, other in others if other in (Cause.INTERRUPT, Cause.TERMINATE)]
    if why is Cause.LINGERING:
        quick_s = min(FAILURE_STOP_S, rules.stop_timeout_s)
        schedule = {task: _Times(until, until + quick_s) for task, until in linger_until(state, rules).items()}
    else:
        schedule = {task: _stop_times(task, at, why, state, rules) for task in state.alive}
    for task, times in schedule.items():
        for other_at, other in asked:
            kill_at = _stop_times(task, other_at, other, state, rules).kill_at
            times = _Times(min(times.term_at, other_at), min(times.kill_at, kill_at))
        if task in rules.servers and why not in (Cause.FAILURE, Cause.OVERDUE, Cause.STALLED):
            times = _after_chief(times, state, rules)
        schedule[task] = times
    return schedule


def _stop_times(task: str, at: float, why: Cause, state: RunState, rules: Rules) -> _Times:
    quick_s = rules.stop_timeout_s if task in state.saving else min(FAILURE_STOP_S, rules.stop_timeout_s)
    alone_s = min(LOCKSTEP_STOP_S, quick_s) if _hangs(task, state, rules) else quick_s
    if why is Cause.FAILURE:
        term_at = at + _settle_s(at, state, rules)
        return _Times(term_at, term_at + alone_s)
    if why in (Cause.OVERDUE, Cause.STALLED):
        # allow for a launcher that was suspended itself and sends the request for stacks late
        term_at = _NEVER if state.dumped_at is None else max(at, state.dumped_at) + DUMP_S
        return _Times(term_at, term_at + quick_s)
    # a script may have something to save at any time
    trained = rules.scripts or (state.training_at is not None and state.training_at <= at)
    kill_at = at + (rules.stop_timeout_s if trained else quick_s)
    # if a task fails while stopping, the others cannot reach the agreed step, so a longer wait does not help
    failures = [end.at for end in state.exits.values() if end.at >= at and is_failure(end, state, rules)]
    kill_at = min([kill_at, _pressed_again(at, state), *(end + SETTLE_S + alone_s for end in failures)])
    # after STOPPED the other tasks are about to end by themselves, since they have agreed on the same last step
    return _Times(at + SETTLE_S if why is Cause.STOPPED else at, kill_at)


def _hangs(task: str, state: RunState, rules: Rules) -> bool:
    """Return True if a task cannot continue after a peer has ended."""
    return rules.needs_every_task and state.training_at is not None and task not in state.saving


def _settle_s(at: float, state: RunState, rules: Rules) -> float:
    """Return the seconds to wait for reports of earlier failures."""
    killed = any(end.at == at and end.code == -signal.SIGKILL for end in state.exits.values())
    return 0.0 if killed and rules.needs_every_task else SETTLE_S


def _pressed_again(at: float, state: RunState) -> float:
    """Return when Ctrl-C was pressed again after the launcher had been asked to end."""
    first = next((fact.at for fact in state.signals), at)
    again = [fact.at for fact in state.signals if fact.number == signal.SIGINT and fact.at > first + REPEAT_S]
    return min(again, default=_NEVER)


def _after_chief(times: _Times, state: RunState, rules: Rules) -> _Times:
    """Return the stop times of a server: after the chief, which cannot save its state without the server."""
    quick_s = min(FAILURE_STOP_S, rules.stop_timeout_s)
    again = _pressed_again(0.0, state)
    if rules.chief in rules.servers:  # the actual chief belongs to another launcher and may need time
        return _Times(times.term_at, min(times.kill_at + quick_s, again))
    chief = state.exits.get(rules.chief)
    if chief is None:
        # do not ask the server to end while the chief needs it to save; only kill it
        return _Times(_NEVER, times.kill_at)
    return _Times(max(times.term_at, chief.at), min(max(times.kill_at, chief.at + quick_s), again))
