"""Finds tasks that show no sign of life, or block the others, from the heartbeats that the caller passes in. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distlaunch.base.liveness import Liveness
from distlaunch.supervise.facts import Stalled

_FROZEN_S = 2.0
"""Seconds without a heartbeat after which an idle process counts as frozen: suspended, or in native code."""
_MIN_TRAINED_S = 10.0
"""Shorter training says nothing about slow tasks."""


@dataclass
class _Life:
    liveness: Liveness
    beat_at: float
    moved_at: float


class Heartbeats:
    """Follows the liveness of the tasks of one attempt.

    Args:
        timeout_s: how long a task may show nothing; None: for ever.
        in_step: tasks that go on together; the others beat only.
    """

    def __init__(self, timeout_s: float | None, in_step: Collection[str]) -> None:
        self._timeout_s, self._in_step = timeout_s, frozenset(in_step)
        self._lives: dict[str, _Life] = {}
        self._checked_at: float | None = None
        self._trained_s = 0.0
        self._waited_s: dict[str, float] = {}

    def check(self, now: float, liveness: Mapping[str, Liveness], *, training: bool, has_event: bool) -> list[Stalled]:
        """Return what is to be reported now.

        Args:
            liveness: liveness of the tasks that have started and are alive.
            training: whether the first step has begun and the last has not ended.
            has_event: whether the run has reported something since the last look (a checkpoint, an epoch).
        """
        for task in list(self._lives):
            # its next process begins with counters of its own
            if task not in liveness:
                del self._lives[task]
        for task, now_shown in liveness.items():
            self._note(task, now_shown, now, has_event=has_event or not training)
        passed = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        together = {task: life for task, life in self._lives.items() if task in self._in_step}
        if training:
            self._count(passed, together)
        if self._timeout_s is None:
            return []
        frozen = self._frozen(now, self._timeout_s)
        # before the first step and after the last tasks do different things: only a frozen one is sure
        if frozen or not training:
            return [Stalled(now, task, frozen=True) for task in frozen]
        # one that still moves is waited for, not stalled
        if not together or any(now - life.moved_at < self._timeout_s for life in together.values()):
            return []
        # nobody moves; who does not even beat is the cause, and the others wait
        if frozen := [task for task in self._frozen(now, min(_FROZEN_S, self._timeout_s / 2)) if task in together]:
            return [Stalled(now, task, frozen=True) for task in frozen]
        # who writes by itself, such as the last checkpoint, has made as many calls as those that wait for it
        behind = [task for task, life in together.items() if life.liveness.saving] or _slowest(together)
        return [Stalled(now, behind[0] if len(behind) < len(together) or len(behind) == 1 else "", frozen=False)]

    def shares(self) -> dict[str, float]:
        """Return for each task the share of training time in which others waited for its next call.

        Empty during the first seconds of training, in which tasks start at different times.
        """
        if self._trained_s < _MIN_TRAINED_S:
            return {}
        return {task: waited / self._trained_s for task, waited in self._waited_s.items()}

    def is_beating(self, task: str, now: float) -> bool:
        """Return True if the process was neither frozen nor gone at the last check."""
        life = self._lives.get(task)
        return life is not None and now - life.beat_at < _FROZEN_S

    def steps(self) -> dict[str, int]:
        """Return the step of each task, as far as reported."""
        return {task: life.liveness.step for task, life in self._lives.items() if life.liveness.step is not None}

    def _count(self, seconds: float, together: Mapping[str, _Life]) -> None:
        self._trained_s += seconds
        behind = _slowest(together)
        # equal counts: nobody waits for anybody
        for task in behind if len(behind) < len(together) else ():
            self._waited_s[task] = self._waited_s.get(task, 0.0) + seconds

    def _note(self, task: str, liveness: Liveness, now: float, *, has_event: bool) -> None:
        life = self._lives.get(task)
        if life is None or liveness.beats < life.liveness.beats:  # the first, or another process
            self._lives[task] = _Life(liveness, now, now)
            return
        if liveness.beats != life.liveness.beats:
            life.beat_at = now
        # an event is progress as well: a long checkpoint makes no step
        if has_event or (liveness.turns, liveness.step) != (life.liveness.turns, life.liveness.step):
            life.moved_at = now
        life.liveness = liveness

    def _frozen(self, now: float, limit_s: float) -> list[str]:
        # 0 beats: no file yet, as of a task that cannot write one
        return [task for task, life in self._lives.items() if life.liveness.beats and now - life.beat_at >= limit_s]


def _slowest(together: Mapping[str, _Life]) -> list[str]:
    """Return the tasks that have made the fewest calls."""
    fewest = min((life.liveness.turns for life in together.values()), default=0)
    return [task for task, life in together.items() if life.liveness.turns == fewest]
