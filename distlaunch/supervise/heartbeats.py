"""Finds tasks that are frozen or block the others, from the heartbeats that the caller passes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distlaunch.base.liveness import Liveness
from distlaunch.supervise.facts import Stalled

_FROZEN_S = 2.0
"""Seconds without a heartbeat after which an idle process counts as frozen: suspended, or in native code."""
_MIN_TRAINED_S = 10.0
"""Shortest training, in seconds, for which waiting times are meaningful."""


@dataclass
class _TaskHistory:
    """The last liveness of a task, when its heartbeat last changed, and when it last made progress."""

    liveness: Liveness
    beat_at: float
    moved_at: float


class Heartbeats:
    """Follows the liveness of the tasks of one attempt.

    Args:
        timeout_s: seconds without progress after which a task is stalled; None for no limit.
        lockstep_tasks: tasks that make each step together. The others only send heartbeats.
    """

    def __init__(self, timeout_s: float | None, lockstep_tasks: Collection[str]) -> None:
        self._timeout_s, self._lockstep_tasks = timeout_s, frozenset(lockstep_tasks)
        self._histories: dict[str, _TaskHistory] = {}
        self._checked_at: float | None = None
        self._trained_s = 0.0
        self._waited_s: dict[str, float] = {}

    def check(self, now: float, liveness: Mapping[str, Liveness], *, training: bool, has_event: bool) -> list[Stalled]:
        """Return the tasks that are stalled now.

        Args:
            now: the time of the liveness, in monotonic seconds.
            liveness: the liveness of the tasks that have started and are alive.
            training: whether the first step has begun and the last has not ended.
            has_event: whether the run has reported an event since the last check (a checkpoint, an epoch).
        """
        for task in list(self._histories):
            # the counters of a restarted process begin at 0
            if task not in liveness:
                del self._histories[task]
        for task, current in liveness.items():
            self._update(task, current, now, has_event=has_event or not training)
        passed = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        lockstep = {task: history for task, history in self._histories.items() if task in self._lockstep_tasks}
        if training:
            self._add_waiting_time(passed, lockstep)
        if self._timeout_s is None:
            return []
        frozen = self._frozen(now, self._timeout_s)
        # before the first step and after the last, tasks differ in their work: only a frozen task is certainly stalled
        if frozen or not training:
            return [Stalled(now, task, frozen=True) for task in frozen]
        # while one task makes progress, the others may be waiting for it
        if not lockstep or any(now - history.moved_at < self._timeout_s for history in lockstep.values()):
            return []
        # no task makes progress: a frozen task is the cause, and the others wait for it
        if frozen := [task for task in self._frozen(now, min(_FROZEN_S, self._timeout_s / 2)) if task in lockstep]:
            return [Stalled(now, task, frozen=True) for task in frozen]
        # a task that is writing files has made as many calls as those that wait for it, so the counts do not show it
        behind = [task for task, history in lockstep.items() if history.liveness.saving] or _slowest(lockstep)
        return [Stalled(now, behind[0] if len(behind) < len(lockstep) or len(behind) == 1 else "", frozen=False)]

    def waited_fractions(self) -> dict[str, float]:
        """Return, for each task, the fraction of the training time in which others waited for its next call.

        Empty during the first seconds of training, since tasks start at different times.
        """
        if self._trained_s < _MIN_TRAINED_S:
            return {}
        return {task: waited / self._trained_s for task, waited in self._waited_s.items()}

    def is_beating(self, task: str, now: float) -> bool:
        """Return True if the process was neither frozen nor gone at the last check."""
        history = self._histories.get(task)
        return history is not None and now - history.beat_at < _FROZEN_S

    def steps(self) -> dict[str, int]:
        """Return the step of each task that has reported one."""
        steps = {task: history.liveness.step for task, history in self._histories.items()}
        return {task: step for task, step in steps.items() if step is not None}

    def _add_waiting_time(self, seconds: float, lockstep: Mapping[str, _TaskHistory]) -> None:
        self._trained_s += seconds
        behind = _slowest(lockstep)
        # if all counts are equal, no task waits for another
        for task in behind if len(behind) < len(lockstep) else ():
            self._waited_s[task] = self._waited_s.get(task, 0.0) + seconds

    def _update(self, task: str, liveness: Liveness, now: float, *, has_event: bool) -> None:
        history = self._histories.get(task)
        if history is None or liveness.beats < history.liveness.beats:  # the first heartbeat of a process
            self._histories[task] = _TaskHistory(liveness, now, now)
            return
        if liveness.beats != history.liveness.beats:
            history.beat_at = now
        # an event is progress as well: no step is made during a long checkpoint
        if has_event or (liveness.calls, liveness.step) != (history.liveness.calls, history.liveness.step):
            history.moved_at = now
        history.liveness = liveness

    def _frozen(self, now: float, limit_s: float) -> list[str]:
        # a task with 0 beats has not written a heartbeat file, perhaps because it cannot
        return [
            task
            for task, history in self._histories.items()
            if history.liveness.beats and now - history.beat_at >= limit_s
        ]


def _slowest(lockstep: Mapping[str, _TaskHistory]) -> list[str]:
    """Return the tasks that have made the fewest calls."""
    fewest = min((history.liveness.calls for history in lockstep.values()), default=0)
    return [task for task, history in lockstep.items() if history.liveness.calls == fewest]
