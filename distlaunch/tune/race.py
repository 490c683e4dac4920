"""Successive halving: candidates take turns in rounds, and the slower half is dropped after every few rounds.

A machine may become slower during the search, and each candidate takes part in other rounds. Candidates are therefore
ranked by ratios: the duration of a step divided by that of the untuned config in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUNDS_PER_STAGE = 2
_OUTLIERS_FROM = 8
"""From this number of rounds on, the range leaves out the fastest and the slowest eighth of the rounds."""
_FAR_BEHIND = 1.5
"""A candidate whose lowest ratio is this many times the highest ratio of the fastest candidate is far behind."""
_SAME = 1.02
"""Candidates within 2 % of the fastest count as equally fast: the one with the fewest changes wins."""


@dataclass(frozen=True)
class Spread:
    """The durations of a step in several rounds, in seconds.

    Attributes:
        low, high: the range of the rounds; of the middle three quarters if there are at least eight.
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Spread:
        ordered = sorted(rounds)
        cut = len(ordered) // _OUTLIERS_FROM
        return Spread(statistics.median(ordered), ordered[cut], ordered[-1 - cut])

    def is_below(self, other: Spread) -> bool:
        """Return True if this range is below the other range without an overlap."""
        return self.high < other.low


@dataclass(frozen=True)
class Entry:
    """A candidate in the choice of the winner.

    Attributes:
        spread: the durations of its steps.
        ratios: the durations, as ratios to those of the untuned config in the same rounds.
        may_win: whether its losses equal those of the untuned config.
        num_changes: the number of changes of the config.
        dropped: whether it was dropped before the last rounds.
    """

    name: str
    spread: Spread
    ratios: Spread
    may_win: bool
    num_changes: int
    dropped: bool = False

    def is_faster_than(self, untuned: Spread) -> bool:
        """Return True if its range is below that of the untuned config, and its rounds are faster than the same rounds.

        Either alone may be chance: a candidate may have few rounds, and all of them while the machine was quiet.
        """
        return self.spread.is_below(untuned) and self.ratios.high < 1


class Race:
    """Measures candidates in rounds.

    Args:
        measure: runs a round of a candidate and returns the duration of a step; None if the candidate has failed.
        drop: called with a candidate that will not be measured again, and the number of its rounds.
        is_last: returns True for candidates that are dropped before all others, such as those with other losses.
        clock: returns monotonic seconds.
        untuned: the candidate with which the others are compared. It enters first and is never dropped.

    Attributes:
        rounds: the durations of a step of each candidate in each of its rounds.
        ratios: the same durations, divided by that of the untuned candidate in the same round.
        running: the candidates that are still measured.
    """

    def __init__(
        self,
        measure: Callable[[str], float | None],
        drop: Callable[[str, int], None],
        is_last: Callable[[str], bool],
        clock: Callable[[], float],
        untuned: str,
    ) -> None:
        self._measure, self._drop, self._is_last, self._clock = measure, drop, is_last, clock
        self._untuned = untuned
        self.rounds: dict[str, list[float]] = {}
        self.ratios: dict[str, list[float]] = {}
        self.running: list[str] = []

    def enter(self, name: str) -> None:
        """Add a candidate that is ready to be measured."""
        self.running.append(name)
        self.rounds[name], self.ratios[name] = [], []

    def leave(self, name: str) -> None:
        """Drop a candidate."""
        self.running.remove(name)
        self._drop(name, len(self.rounds[name]))

    def run(self, num_rounds: int, until: float, *, at_least: int = 1) -> None:
        """Measure all candidates in up to `num_rounds` rounds until a time, but at least in `at_least` rounds."""
        for number in range(num_rounds):
            is_alone = len(self.running) < 2 and all(map(self.rounds.get, self.running))
            if number >= at_least and (is_alone or self._clock() >= until):
                return
            for name in list(self.running):
                duration = self._measure(name)
                if duration is None:
                    self.running.remove(name)
                else:
                    self.rounds[name].append(duration)
                    # the untuned candidate has entered first, so this round has already measured it
                    self.ratios[name].append(duration / self.rounds[self._untuned][-1])

    def halve(self, keep: int, until: float) -> None:
        """Measure candidates and drop the slower half, until `keep` of those that may be dropped are left.

        Candidates that are far behind are dropped after one round.
        """
        while len(candidates := self._droppable()) > keep:
            for _ in range(ROUNDS_PER_STAGE):
                is_known = all(self.rounds[name] for name in self.running)
                self.run(1, until, at_least=0 if is_known else 1)
                self._drop_far_behind()
            ranked = [name for name in self.ranking() if name in candidates and name in self.running]
            for name in ranked[max(keep, (len(ranked) + 1) // 2) :]:
                self.leave(name)

    def _drop_far_behind(self) -> None:
        ranked = [name for name in self.ranking() if not self._is_last(name)]
        if ranked:
            limit = _FAR_BEHIND * max(self.ratios[ranked[0]])
            for name in [name for name in self._droppable() if min(self.ratios[name], default=0.0) > limit]:
                self.leave(name)

    def _droppable(self) -> list[str]:
        return [name for name in self.running if name != self._untuned]

    def ranking(self) -> list[str]:
        """Return the running candidates that were measured, the fastest first."""
        measured = [name for name in self.running if self.rounds[name]]
        return sorted(measured, key=lambda name: (self._is_last(name), statistics.median(self.ratios[name])))


def choose(entries: Sequence[Entry], untuned: Entry) -> Entry:
    """Return the winner: the fastest entry that may win and is proven to be faster than the untuned config."""
    proven = [entry for entry in entries if entry.may_win and entry.is_faster_than(untuned.spread)]
    # the few rounds of a dropped candidate may look fast by chance, but those that stayed were faster in them
    faster = [entry for entry in proven if not entry.dropped] or proven
    if not faster:
        return untuned
    limit = _SAME * min(entry.ratios.median for entry in faster)
    near = [entry for entry in faster if entry.ratios.median <= limit]
    return min(near, key=lambda entry: (entry.num_changes, entry.ratios.median))


def steps_of_round(step_s: float, steps_per_call: int, round_s: float) -> int:
    """Return the number of steps in a round, which consists of whole calls."""
    calls = max(1, round(round_s / max(step_s * steps_per_call, 1e-6)))
    return calls * steps_per_call
