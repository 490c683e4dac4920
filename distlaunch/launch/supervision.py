"""What to do about a run's processes, as pure functions: history in, what to do and how it ended out."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from distlaunch.errors import ExitCode
from distlaunch.launch.facts import Asked, Blame, Blamed, Came, Exited, Fact, Finished, Rules, Sent, Spawned, Training
from distlaunch.protocol import DUMP_SIGNAL

SETTLE_S = 0.7
"""After a first failure: how long to wait for others, to see who really came first."""
FAILURE_STOP_S = 5.0
"""How long tasks may take to end when there is nothing to save: a peer failed, or the first step was never reached."""
DUMP_S = 0.5
"""How long tasks may take to write their stacks, before they are stopped because the first step did not begin."""
REPEAT_S = 0.3
"""A second Ctrl-C within this time is the same one, told twice (by the terminal and by a wrapper such as `uv run`)."""
GIVE_UP_S = 10.0
"""A process that SIGKILL has not ended after this time sleeps in the kernel, and nobody can end it."""


class Why(enum.Enum):
    """Why the tasks are being stopped, or have ended."""

    NOTHING = "nothing"
    FAILURE = "failure"
    OVERDUE = "overdue"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    STOPPED = "stopped"  # a task stopped cleanly, asked by someone else
    LINGERING = "lingering"  # the chief is done, others do not end


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Attributes:
        send: signal to send to every task that is left.
        wake_at: when to decide again if nothing happens until then.
        over: nothing is left to wait for.
    """

    why: Why
    send: signal.Signals | None = None
    wake_at: float | None = None
    over: bool = False


@dataclass(frozen=True)
class Verdict:
    """How it ended.

    Attributes:
        status: as in RunEnded.
        culprit: the task that failed first.
        silent: tasks that neither failed nor answered when the culprit's error says that a peer is gone.
        late: tasks that had to be killed because they did not stop in time.
        odd: tasks that failed after the run was done.
    """

    status: str
    exit_code: ExitCode
    why: Why
    culprit: str | None = None
    silent: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()


@dataclass(frozen=True)
class _View:
    """The history, sorted by kind."""

    spawned: dict[str, float] = field(default_factory=dict)
    came: set[str] = field(default_factory=set)
    training_at: float | None = None
    finished: dict[str, float] = field(default_factory=dict)
    exits: dict[str, Exited] = field(default_factory=dict)
    blames: dict[str, Blamed] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    sent: dict[signal.Signals, float] = field(default_factory=dict)

    @property
    def alive(self) -> list[str]:
        return [task for task in self.spawned if task not in self.exits]


def _view(history: Sequence[Fact]) -> _View:
    spawned = {fact.task: fact.at for fact in history if isinstance(fact, Spawned)}
    finished: dict[str, float] = {}
    exits: dict[str, Exited] = {}
    blames: dict[str, Blamed] = {}
    sent: dict[signal.Signals, float] = {}
    training_at = None
    for fact in history:
        match fact:
            case Finished(at, task):
                finished.setdefault(task, at)
            case Exited(_, task, _):
                exits.setdefault(task, fact)
            case Blamed(_, task, _):
                blames.setdefault(task, fact)
            case Sent(at, number):
                sent.setdefault(number, at)
            case Training(at):
                training_at = at if training_at is None else training_at
    came = {fact.task for fact in history if isinstance(fact, Came)}
    asked = [fact for fact in history if isinstance(fact, Asked)]
    return _View(spawned, came, training_at, finished, exits, blames, asked, sent)


def is_failure(end: Exited, view: _View, rules: Rules) -> bool:
    """Whether this end of a task, taken alone, is one that should not be."""
    chief_done = view.finished.get(rules.chief)
    if chief_done is not None and chief_done <= end.at:
        return False
    if end.code == ExitCode.DONE:
        return rules.needs_finish and end.task not in view.finished
    return end.code != ExitCode.PREEMPTED


def _reasons(view: _View, rules: Rules) -> list[tuple[float, Why]]:
    """Everything that calls for a stop, with its time."""
    found = [(fact.at, Why.INTERRUPT if fact.number == signal.SIGINT else Why.TERMINATE) for fact in view.asked]
    for end in view.exits.values():
        if is_failure(end, view, rules):
            found.append((end.at, Why.FAILURE))
        elif end.code == ExitCode.PREEMPTED:
            found.append((end.at, Why.STOPPED))
    chief = view.exits.get(rules.chief)
    if chief is not None and not is_failure(chief, view, rules) and chief.code != ExitCode.PREEMPTED:
        only_servers = bool(view.alive) and all(task in rules.servers for task in view.alive)
        found.append((chief.at + (0 if only_servers else rules.stop_timeout_s), Why.LINGERING))
    if view.spawned:
        deadline = min(view.spawned.values()) + rules.start_timeout_s
        if view.training_at is None or view.training_at > deadline:
            found.append((deadline, Why.OVERDUE))
    return sorted(found, key=lambda reason: reason[0])


def _stop_times(at: float, why: Why, view: _View, rules: Rules) -> tuple[float, float]:
    """When to ask the tasks to end, and when to kill them."""
    if why is Why.FAILURE:
        return at + SETTLE_S, at + SETTLE_S + min(FAILURE_STOP_S, rules.stop_timeout_s)
    if why is Why.OVERDUE:
        return at + DUMP_S, at + DUMP_S + min(FAILURE_STOP_S, rules.stop_timeout_s)
    if why is Why.LINGERING:
        return at, at + min(FAILURE_STOP_S, rules.stop_timeout_s)
    trained = view.training_at is not None and view.training_at <= at
    kill_at = at + (rules.stop_timeout_s if trained else min(FAILURE_STOP_S, rules.stop_timeout_s))
    # a task that fails while stopping takes the agreed step with it: the others cannot stop cleanly any more
    failures = [end.at for end in view.exits.values() if end.at >= at and is_failure(end, view, rules)]
    kill_at = min([kill_at, *(failed + SETTLE_S + FAILURE_STOP_S for failed in failures)])
    again = [fact.at for fact in view.asked if fact.number == signal.SIGINT]
    first = next((fact.at for fact in view.asked), at)
    kill_at = min([kill_at, *(ctrl_c for ctrl_c in again if ctrl_c > first + REPEAT_S)])
    return (at + SETTLE_S if why is Why.STOPPED else at), kill_at


def decide(history: Sequence[Fact], now: float, rules: Rules) -> Decision:
    """What to do now, given what has happened."""
    view = _view(history)
    reasons = _reasons(view, rules)
    due = [reason for reason in reasons if reason[0] <= now]
    at, why = due[0] if due else (0.0, Why.NOTHING)
    if not view.alive:
        return Decision(why, over=True)
    if why is Why.NOTHING:
        return Decision(why, wake_at=reasons[0][0] if reasons else None)
    term_at, kill_at = _stop_times(at, why, view, rules)
    # whoever asks to end while another reason already holds is heard too
    for other_at, other in due[1:]:
        if other in (Why.INTERRUPT, Why.TERMINATE):
            term_at = min(term_at, other_at)
            kill_at = min(kill_at, _stop_times(other_at, other, view, rules)[1])
    killed_at = view.sent.get(signal.SIGKILL)
    if killed_at is not None:
        return Decision(why, wake_at=killed_at + GIVE_UP_S, over=now >= killed_at + GIVE_UP_S)
    if now >= kill_at:
        return Decision(why, send=signal.SIGKILL)
    if now >= term_at and signal.SIGTERM not in view.sent:
        return Decision(why, send=signal.SIGTERM)
    if why is Why.OVERDUE and not view.sent:
        return Decision(why, send=DUMP_SIGNAL)
    return Decision(why, wake_at=kill_at if signal.SIGTERM in view.sent else min(term_at, kill_at))


def conclude(history: Sequence[Fact], now: float, rules: Rules) -> Verdict:
    """How the run ended; to be asked when `decide` says that it is over."""
    view = _view(history)
    due = [reason for reason in _reasons(view, rules) if reason[0] <= now]
    why = due[0][1] if due else Why.NOTHING
    late = _late(view)
    if view.asked and view.asked[0].number == signal.SIGINT and why is Why.INTERRUPT:
        if _all_done(view, rules):
            return Verdict("done", ExitCode.DONE, Why.NOTHING, late=late)
        return Verdict("interrupted", ExitCode.INTERRUPTED, why, late=late)
    if why is Why.FAILURE:
        culprit, silent = _culprit(view, rules)
        return Verdict("failed", ExitCode.FAILED, why, culprit=culprit, silent=silent)
    if why is Why.OVERDUE:
        missing = tuple(task for task in view.spawned if task not in view.came)
        return Verdict("failed", ExitCode.FAILED, why, silent=missing)
    if why in (Why.TERMINATE, Why.STOPPED):
        return _stopped(view, rules, why, late)
    told_to_end_at = min(view.sent.values(), default=float("inf"))
    odd = tuple(end.task for end in view.exits.values() if end.code != ExitCode.DONE and end.at < told_to_end_at)
    return Verdict("done", ExitCode.DONE, Why.NOTHING, late=late, odd=odd)


def _stopped(view: _View, rules: Rules, why: Why, late: tuple[str, ...]) -> Verdict:
    asked_at = next((fact.at for fact in view.asked), min((end.at for end in view.exits.values()), default=0.0))
    if _all_done(view, rules):
        return Verdict("done", ExitCode.DONE, Why.NOTHING, late=late)
    if any(fact.number == signal.SIGINT for fact in view.asked):
        return Verdict("interrupted", ExitCode.INTERRUPTED, why, late=late)
    if view.training_at is None or view.training_at > asked_at:
        return Verdict("stopped", ExitCode.PREEMPTED, why, late=late)
    bad = [end for end in view.exits.values() if is_failure(end, view, rules)]
    if not bad and not view.alive:
        return Verdict("stopped", ExitCode.PREEMPTED, why)
    failed = [end.task for end in bad if end.task not in late]
    culprit = failed[0] if failed else next(iter(late), None)
    return Verdict("failed", ExitCode.FAILED, why, culprit=culprit, late=late)


def _all_done(view: _View, rules: Rules) -> bool:
    """Whether the run came to its planned end although it was asked to stop."""
    if rules.needs_finish:
        return rules.chief in view.finished
    return not view.alive and all(end.code == ExitCode.DONE for end in view.exits.values())


def _late(view: _View) -> tuple[str, ...]:
    killed_at = view.sent.get(signal.SIGKILL)
    if killed_at is None:
        return ()
    return tuple(task for task in view.spawned if task not in view.exits or view.exits[task].at >= killed_at)


def _culprit(view: _View, rules: Rules) -> tuple[str | None, tuple[str, ...]]:
    """Who failed first, and who is silent if all that is known is that somebody is gone."""
    horizon = view.sent.get(signal.SIGTERM, view.sent.get(signal.SIGKILL, float("inf")))
    blames = {task: fact for task, fact in view.blames.items() if fact.at <= horizon}
    ends = {
        task: end
        for task, end in view.exits.items()
        if end.at <= horizon and (is_failure(end, view, rules) or task in blames)
    }
    ranked = sorted(dict.fromkeys([*ends, *blames]), key=lambda task: _rank(ends.get(task), blames.get(task)))
    if not ranked:
        return None, ()
    first = ranked[0]
    blame = blames.get(first)
    if blame is None or blame.blame is not Blame.CONSEQUENCE:
        return first, ()
    gone = {task for task, end in view.exits.items() if end.at <= horizon}
    return first, tuple(task for task in view.spawned if task not in gone and task not in blames)


def _rank(end: Exited | None, blame: Blamed | None) -> tuple[int, float]:
    order = {Blame.CONFIG: 0, Blame.CAUSE: 1, Blame.CONSEQUENCE: 2}
    at = min(fact.at for fact in (end, blame) if fact is not None)
    return (order[blame.blame] if blame else 1), at
