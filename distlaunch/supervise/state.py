"""Pure functions that compute the state of a run's processes from the history, and the reasons to stop them."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.supervise.facts import (
    Absent,
    Closed,
    ErrorReported,
    ErrorRole,
    Exited,
    Fact,
    Finished,
    GivenUp,
    Progressed,
    Ready,
    Rules,
    Saving,
    Sent,
    Signal,
    Spawned,
    Stalled,
    Training,
)

_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
MAX_FAILED_STARTS = 3
"""A task that ends this many times in a row before it is ready is not restarted."""
EXIT_AFTER_ERROR_S = 5.0
"""Seconds in which a script must exit after it has raised an exception."""


class Cause(enum.Enum):
    """The reason why tasks are stopped or have ended."""

    NOTHING = "nothing"
    FAILURE = "failure"
    OVERDUE = "overdue"
    STALLED = "stalled"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    STOPPED = "stopped"  # a task stopped cleanly, because something other than this launcher asked it to
    LINGERING = "lingering"  # the chief is done, but other tasks do not end


TimedReason = tuple[float, Cause]
"""The time from which a reason to stop holds, and the reason."""


@dataclass
class RunState:
    """The history, sorted by kind. For a restarted task, only facts about its current process are kept.

    Attributes:
        spawned: when each task was first started.
        failed_starts: how many times in a row each task has ended before it was ready.
        reported_at: when each task last reported something.
        training_at: when the first step began.
        saving: tasks that are writing a checkpoint or another file that no other task writes.
        closed: when each task reported the end of its work, planned or not.
        finished: when each task reported the planned end of its work.
        stalled: tasks that block the others; an empty name if all wait for each other.
        absent: when a task was found not to have opened its port.
        given_up: tasks that are not restarted.
        dumped_at: when tasks were first asked for their stacks.
        termed: when each task was first asked to stop.
        killed: when each task was killed.
    """

    spawned: dict[str, float] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    failed_starts: dict[str, int] = field(default_factory=dict)
    reported_at: dict[str, float] = field(default_factory=dict)
    training_at: float | None = None
    saving: set[str] = field(default_factory=set)
    closed: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    exits: dict[str, Exited] = field(default_factory=dict)
    errors: dict[str, ErrorReported] = field(default_factory=dict)
    stalled: dict[str, Stalled] = field(default_factory=dict)
    absent: dict[str, float] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    signals: list[Signal] = field(default_factory=list)
    dumped_at: float | None = None
    termed: dict[str, float] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(history: Sequence[Fact]) -> RunState:
        state = RunState()
        for fact in history:
            state.add(fact)
        return state

    @property
    def alive(self) -> list[str]:
        return [task for task in self.spawned if task not in self.exits]

    def add(self, fact: Fact) -> None:
        match fact:
            case Spawned(at, task):
                self._start(at, task)
            case Ready(at, task):
                self.ready.add(task)
                self.reported_at[task] = at
                self.failed_starts.pop(task, None)
            case Progressed(at, task):
                self.reported_at[task] = at
            case Training(at):
                self.training_at = at if self.training_at is None else self.training_at
            # `setdefault` here and below: if a fact is reported again, keep its first time
            case Finished(at, task):
                self.finished.setdefault(task, at)
                self.closed.setdefault(task, at)
            case Closed(at, task):
                self.closed.setdefault(task, at)
            case Exited(_, task, _):
                self.exits.setdefault(task, fact)
                # counts ends before `Ready`, which resets the counter
                self.failed_starts[task] = self.failed_starts.get(task, 0) + (task not in self.ready)
            case ErrorReported(_, task, _):
                self.errors.setdefault(task, fact)
            case Stalled(_, task, _):
                self.stalled.setdefault(task, fact)
            case Saving(_, task, over):
                (self.saving.discard if over else self.saving.add)(task)
            case Absent(at, task):
                self.absent.setdefault(task, at)
            case GivenUp(_, task):
                self.given_up.add(task)
            case Signal():
                self.signals.append(fact)
            case Sent(at, order, to):
                self._order(at, order, to)
            case _:
                pass

    def _start(self, at: float, task: str) -> None:
        if task in self.spawned:
            self.restarted.add(task)
        self.spawned.setdefault(task, at)
        self.ready.discard(task)
        self.saving.discard(task)
        self.exits.pop(task, None)
        for stop_times in (self.errors, self.stalled, self.termed, self.killed):
            stop_times.pop(task, None)

    def _order(self, at: float, order: Order, to: tuple[str, ...]) -> None:
        if order is Order.DUMP and self.dumped_at is None:
            self.dumped_at = at
        stop_times = {Order.STOP: self.termed, Order.KILL: self.killed}.get(order, {})
        for task in to or self.alive:
            stop_times.setdefault(task, at)


def is_hopeless(task: str, state: RunState) -> bool:
    """Return True if a restarted task would end the same way."""
    error = state.errors.get(task)
    own = error is not None and error.role in (ErrorRole.CONFIG, ErrorRole.CAUSE)
    return own or state.failed_starts.get(task, 0) >= MAX_FAILED_STARTS


def needs_restart(end: Exited, state: RunState, rules: Rules) -> bool:
    """Return True if a task should be restarted after this end, unless the run is stopped."""
    if end.task not in rules.replaceable or is_hopeless(end.task, state):
        return False
    if rules.scripts and end.code not in (-signal.SIGKILL, -signal.SIGTERM):
        return False
    # a server whose chief belongs to another launcher may exit by itself; only a signal ends it too early
    return end.task != rules.chief or end.code < 0


def is_failure(end: Exited, state: RunState, rules: Rules) -> bool:
    """Return True if this end of a task is a failure by itself."""
    if end.task in rules.optional:
        return False
    # an exit after the end of the run is not a failure of the run
    chief_done = state.finished.get(rules.chief)
    if chief_done is not None and chief_done <= end.at:
        return False
    stopped_at = state.termed.get(end.task, float("inf"))
    if stopped_at <= end.at:
        had_raised = end.task in state.errors and state.errors[end.task].at <= stopped_at
        by_signal = rules.scripts and end.code in _ENDED_BY_SIGTERM and not had_raised
        # the task was asked to end, and has ended
        if end.task in rules.servers or by_signal:
            return False
    if rules.scripts and end.code == ExitCode.DONE:
        return False
    if end.task in rules.replaceable and (end.task != rules.chief or end.code < 0):
        return not needs_restart(end, state, rules)
    if end.code == ExitCode.DONE:
        return rules.needs_finish and end.task not in state.finished
    return end.code not in rules.preempted


def reasons(state: RunState, rules: Rules) -> list[TimedReason]:
    """Return all reasons to stop with their times, earliest first."""
    found = [(fact.at, Cause.INTERRUPT if fact.number == signal.SIGINT else Cause.TERMINATE) for fact in state.signals]
    for end in state.exits.values():
        if is_failure(end, state, rules):
            found.append((end.at, Cause.FAILURE))
        elif end.code in rules.preempted and end.task not in rules.auxiliary:
            found.append((end.at, Cause.STOPPED))
    if rules.scripts:
        found += [
            (fact.at + EXIT_AFTER_ERROR_S, Cause.FAILURE)
            for fact in state.errors.values()
            if _hangs_at_exit(fact, state, rules)
        ]
    if has_ended_well(state, rules):
        until = linger_until(state, rules)
        found.append((min(until.values(), default=float("inf")), Cause.LINGERING))
    # a replaceable task is killed and restarted instead; see `decide`
    found += [(fact.at, Cause.STALLED) for fact in state.stalled.values() if fact.task not in rules.replaceable]
    found += [(at, Cause.OVERDUE) for at in state.absent.values()]
    if state.spawned:
        deadline = min(state.spawned.values()) + rules.start_timeout_s
        if state.training_at is None or _was_stopped_between(deadline, state.training_at, state):
            found.append((deadline, Cause.OVERDUE))
    # sort by time only (causes cannot be compared); reasons of the same time stay in the order above
    return sorted(found, key=lambda reason: reason[0])


def _hangs_at_exit(fact: ErrorReported, state: RunState, rules: Rules) -> bool:
    """Return True if a task has reported a fatal exception but its process has not exited."""
    if fact.task in state.exits or fact.task in rules.optional:
        return False
    return fact.task not in rules.replaceable or fact.role is not ErrorRole.CONSEQUENCE


def _was_stopped_between(begin: float, end: float, state: RunState) -> bool:
    """Return True if tasks were asked to stop between two times.

    If they were not, training that began between these times may have begun earlier and been detected late.
    """
    stop_times = [state.dumped_at, *state.termed.values(), *state.killed.values()]
    return any(at is not None and begin <= at < end for at in stop_times)


def has_ended_well(state: RunState, rules: Rules) -> bool:
    """Return True if the tasks that decide about the run have succeeded: the chief, or all tasks of a script."""
    ends = [state.exits.get(task) for task in _leaders(state, rules)]
    return all(end is not None and _is_good(end, state, rules) for end in ends)


def _is_good(end: Exited, state: RunState, rules: Rules) -> bool:
    if end.code in rules.preempted:
        return False
    return not is_failure(end, state, rules) and not needs_restart(end, state, rules)


def _leaders(state: RunState, rules: Rules) -> list[str]:
    if not rules.scripts:
        return [rules.chief]
    return [task for task in state.spawned if task not in rules.auxiliary]


def linger_until(state: RunState, rules: Rules) -> dict[str, float]:
    """Return the time until which each remaining task may run after the chief has succeeded."""
    chief_at = max(state.exits[leader].at for leader in _leaders(state, rules))

    def until(task: str) -> float:
        if task in rules.servers:
            return chief_at
        if task in rules.optional:
            return max(chief_at, state.reported_at.get(task, chief_at)) + rules.start_timeout_s
        return chief_at + rules.stop_timeout_s

    return {task: until(task) for task in state.alive}
