"""Lanes of candidates share the time of a search, so that slow starts in one lane take none from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from distlaunch.tune.candidates import Candidate


class Lane:
    """Candidates that are started one after the other.

    Args:
        take: returns the next candidate; None if there is none at the moment.
        until: the time until which its candidates must be ready.

    Attributes:
        durations: the duration of each start that has ended, in seconds.
    """

    def __init__(self, take: Callable[[], Candidate | None], until: float) -> None:
        self.take, self.until = take, until
        self.durations: list[float] = []

    @classmethod
    def of(cls, candidates: Iterable[Candidate], until: float) -> Self:
        """Return a lane of known candidates."""
        waiting = iter(candidates)
        return cls(lambda: next(waiting, None), until)


class Starts:
    """The starts of the candidates of several lanes.

    The next candidate comes from the lane with fewer candidates that are starting; among equals, from the lane whose
    starts have taken less time.

    Attributes:
        left_out: the reason for each candidate that was not started.
    """

    def __init__(self, lanes: Iterable[Lane], most_at_once: int) -> None:
        self._lanes, self._most_at_once = list(lanes), most_at_once
        self._starting: dict[str, tuple[Lane, float]] = {}
        self.left_out: dict[str, str] = {}

    @property
    def starting(self) -> dict[str, float]:
        """The candidates that are starting, with the times at which their starts began."""
        return {name: began for name, (_, began) in self._starting.items()}

    def take(self, now: float, why_not: Callable[[Candidate, Lane], str]) -> Candidate | None:
        """Return the next candidate to start; None if there is none at the moment.

        Args:
            why_not: returns why this and the other candidates of its lane are not started, or an empty string.
        """
        if len(self._starting) >= self._most_at_once:
            return None
        for lane in sorted(self._lanes, key=lambda lane: (self._num_starting(lane), sum(lane.durations))):
            candidate = lane.take()
            if candidate is None:
                continue  # one that is starting may lead to others
            if reason := why_not(candidate, lane):
                self._lanes.remove(lane)
                self.left_out |= {each.name: reason for each in [candidate, *iter(lane.take, None)]}
                continue
            self._starting[candidate.name] = lane, now
            return candidate
        return None

    def _num_starting(self, lane: Lane) -> int:
        return sum(other is lane for other, _ in self._starting.values())

    def end(self, name: str, now: float) -> float:
        """Record the end of a start and return its duration in seconds."""
        lane, began = self._starting.pop(name)
        lane.durations.append(now - began)
        return now - began
