"""Compares the winner of `distlaunch tune` with the best of an exhaustive search.

    python scripts/benchmark_tune.py CONFIG [--seconds 60] [--pairs 10] [--rounds 3] [--only TEXT] [--most N]

Runs `tune`, then measures all combinations that it could have named, each for a few rounds, and then the winner and the
best combination in pairs of rounds that take turns. A combination counts only if its losses equal those of the untuned
config. Prints both, the ratio of their step times with its range, and whether the winner is good enough: its median is
at most 5 % above that of the best, or the ranges overlap, and its losses are equal.

The exit code is 1 if it is not. `--only` and `--most` limit the exhaustive search, for a first try.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record
from distlaunch.cluster.machine import Machine
from distlaunch.config.run import RunConfig
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.plan.train import REMOVED_ENV
from distlaunch.supervise.requests import SignalPipe
from distlaunch.tune.candidates import Candidate, Change, settings, strategies, untuned
from distlaunch.tune.contestant import Contestant, Reference, TrialFailed
from distlaunch.tune.contexts import Contexts
from distlaunch.tune.equality import judge_candidate
from distlaunch.tune.race import Spread
from distlaunch.tune.site import Site
from distlaunch.tune.tuning import RECORDED_STEPS
from distlaunch.verify.comparison import failure_text

ROUND_S = 0.4
GOOD = 1.05
POLL_S = 0.02


@dataclass(frozen=True)
class Measured:
    """A combination that was measured.

    Attributes:
        rounds: the duration of a step in each round, in seconds.
        is_equal: whether its losses equal those of the untuned config.
    """

    candidate: Candidate
    rounds: Sequence[float]
    is_equal: bool

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of tune")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of rounds of winner and best")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each combination in the exhaustive search")
    parser.add_argument("--only", action="append", default=[], help="measure only combinations with this text")
    parser.add_argument("--most", type=int, help="measure only the first combinations")
    words = parser.parse_args()
    row = winner_of(words.config, words.seconds)
    with Bench(words.config) as bench:
        every = combinations(bench.config, bench.site)
        winner = next(each for each in every if is_row(each, row))
        wanted = [each for each in every[1:] if not words.only or any(text in each.name for text in words.only)]
        # the losses of the others are compared with those of the untuned config
        found = bench.search([every[0], *wanted[: words.most]], words.rounds)
        equal = [each for each in found if each.is_equal]
        best = min(equal, key=lambda each: each.median_s).candidate if equal else winner
        print(f"\nwinner of tune: {winner.name}\nbest of {len(found)} combinations: {best.name}", flush=True)
        pairs, is_equal = bench.compare(winner, best, words.pairs)
    return conclude(pairs, is_equal=is_equal)


def winner_of(config: str, seconds: float) -> dict[str, Any]:
    """Return the row of the winner of `distlaunch tune`."""
    began = time.monotonic()
    command = [sys.executable, "-P", "-c", "from distlaunch.cli.main import main; main()", "tune", config]
    done = subprocess.run([*command, "--seconds", str(seconds), "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)  # it has said why
    result = json.loads(done.stdout)
    print(f"tune: {result['winner']}, {len(result['rows'])} candidates in {time.monotonic() - began:.0f} s", flush=True)
    return next(row for row in result["rows"] if row["candidate"] == result["winner"])


def combinations(config: RunConfig, site: Site) -> list[Candidate]:
    """Return all combinations of a strategy and settings that `tune` can name, except those in 16 bits."""
    found = [untuned(config), *(each for each in strategies(config, site) if isinstance(each, Candidate))]
    return [combined for candidate in found for combined in with_settings(candidate, settings(candidate, site))]


def with_settings(candidate: Candidate, single: Iterable[object]) -> Iterator[Candidate]:
    """Yield a candidate with each combination of settings.

    Args:
        single: the candidate with each single setting.
    """
    values: dict[tuple[object, ...], list[Change]] = {}
    for each in single:
        if isinstance(each, Candidate) and not each.is_16_bit:
            change = each.changes[-1]
            values.setdefault((*change.keys, *change.environ), []).append(change)
    for chosen in itertools.product(*([None, *changes] for changes in values.values())):
        yield candidate.with_change(*(change for change in chosen if change is not None))


def is_row(candidate: Candidate, row: dict[str, Any]) -> bool:
    """Return True if a candidate has the settings of a row of `tune --json`."""
    keys = {".".join(map(str, key)): value for key, value in candidate.keys.items()}
    return (keys, candidate.environ) == (row["keys"], row["environment"])


class Bench:
    """Measures combinations in the way of `tune`; a context manager that ends their tasks."""

    def __init__(self, file: str) -> None:
        self._entered = ExitStack()
        request = JobRequest(file, ("resume=never",), makes_run_dir=False)
        self._choice = choose(request, Machine.here().without_variables(REMOVED_ENV))
        self.config = self._choice.config
        self.site: Site
        self._untuned: Record | None = None

    def __enter__(self) -> Bench:
        self._signals = self._entered.enter_context(SignalPipe())
        self._contexts = self._entered.enter_context(Contexts(self._choice.context))
        folder = self._entered.enter_context(tempfile.TemporaryDirectory(prefix="distlaunch-tune-"))
        context = self._contexts.take({})
        self.site = Site.of(self.config, context)
        self._reference = Reference(self.config, RunDir.claim(Path(folder), "verify"), context, RECORDED_STEPS)
        self._entered.callback(self._reference.close)
        self._entered.callback(self._reference.ask_to_stop)
        self._reference.start()
        while (record := self._reference.record()) is None:
            self._stop_if_asked()
            time.sleep(POLL_S)
        self._reference_record = record
        self._contexts.give_back(context, {})
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def search(self, combinations: Sequence[Candidate], rounds: int) -> list[Measured]:
        """Measure combinations one after the other, and print each."""
        found: list[Measured] = []
        for number, candidate in enumerate(combinations, 1):
            with ExitStack() as stack:
                try:
                    contestant, is_equal = self._started(candidate, stack)
                    times = [contestant.measure() for _ in range(rounds)]
                except TrialFailed as failed:
                    end = failed.result
                    why = str(end) if isinstance(end, BaseException) else failure_text(end)
                    print(f"{number}/{len(combinations)} {candidate.name}: {why}", flush=True)
                    continue
            found.append(Measured(candidate, times, is_equal))
            losses = "" if is_equal else ", other losses"
            print(f"{number}/{len(combinations)} {candidate.name}: {found[-1].median_s * 1000:.2f} ms{losses}",
                  flush=True)  # fmt: skip
        return found

    def compare(self, one: Candidate, other: Candidate, pairs: int) -> tuple[list[tuple[float, float]], bool]:
        """Return the durations of a step of two candidates in pairs of rounds, and whether the first has equal losses.

        If both are the same candidate, it is measured against itself.
        """
        with ExitStack() as stack:
            (first, is_equal), (second, _) = self._started(one, stack), self._started(other, stack)
            # which of the two is measured first in a pair changes each time
            found: list[tuple[float, float]] = []
            for number in range(pairs):
                if number % 2:
                    later, earlier = second.measure(), first.measure()
                    found.append((earlier, later))
                else:
                    found.append((first.measure(), second.measure()))
        return found, is_equal

    def _started(self, candidate: Candidate, stack: ExitStack) -> tuple[Contestant, bool]:
        """Start a candidate; return it once it is ready to be measured, and whether its losses are equal."""
        context = self._contexts.take(candidate.environ)
        run = Contestant.run_dir(self._reference.run, RECORDED_STEPS)
        contestant = Contestant(
            candidate, run, context, RECORDED_STEPS, ROUND_S, self.site.hardware.num_cores, self._stop_if_asked
        )
        stack.callback(self._contexts.give_back, context, candidate.environ)
        stack.callback(contestant.close)
        stack.callback(contestant.ask_to_stop)
        contestant.start()
        while not contestant.is_prepared():
            self._stop_if_asked()
            time.sleep(POLL_S)
        record = contestant.record()
        self._untuned = self._untuned or record  # the untuned config is measured first
        return contestant, judge_candidate(record, self._untuned, self._reference_record).equal

    def _stop_if_asked(self) -> None:
        if self._signals.stop_is_requested():
            raise KeyboardInterrupt


def conclude(pairs: Sequence[tuple[float, float]], *, is_equal: bool) -> int:
    """Print the comparison of winner and best; return the exit code."""
    winner, best = Spread.of([one for one, _ in pairs]), Spread.of([other for _, other in pairs])
    for name, spread in (("winner", winner), ("best", best)):
        print(f"{name}: {spread.median * 1000:.2f} ms ({spread.low * 1000:.2f} to {spread.high * 1000:.2f})")
    ratios = sorted(one / other for one, other in pairs)
    median = statistics.median(ratios)
    print(f"ratio in {len(pairs)} pairs: {median:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    overlaps = not (winner.is_below(best) or best.is_below(winner))
    is_good = is_equal and (winner.median <= GOOD * best.median or overlaps)
    losses = "its losses are equal" if is_equal else "its losses differ"
    print(f"{'good' if is_good else 'NOT GOOD'}: {winner.median / best.median:.3f} of the best median, "
          f"the ranges {'overlap' if overlaps else 'do not overlap'}, {losses}")  # fmt: skip
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
