"""Disturbs small runs at random, and checks that each ends with the right weights or says what happened to it.

    python scripts/chaos.py [--faults 200] [--seed 0] [--strategies jax,dtensor] [--kinds kill,stop] [--jobs 2]

Each trial trains a few hundred steps under one strategy and is disturbed once: a task or the launcher is killed (also
while it writes a checkpoint), frozen or asked to end, a task fails, a checkpoint is truncated, the disk is full for a
while, or a port is in use. A run that did not end well is resumed. In the end:
- Its weights must equal those of an undisturbed run of the same strategy, bit for bit. With several workers of
  parameter servers, the number of steps must be the same.
- The failure must have been reported in time, with its task and its cause.
- No process, no bound port and no temporary file may be left.

Trial N of `--seed S` is `--seed S+N --faults 1`.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos_faults import Disturbance
from chaos_runs import STRATEGIES, undisturbed
from chaos_trial import FAULTS, Result, Trial

ASYNCHRONOUS = ("parameter_server",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", type=_names(STRATEGIES), default=tuple(STRATEGIES))
    parser.add_argument("--kinds", type=_names(FAULTS), default=FAULTS, help="which faults")
    parser.add_argument("--jobs", type=int, default=1, help="number of trials at the same time")
    words = parser.parse_args()
    # a shell starts background jobs with Ctrl-C ignored, which the launchers would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trials = [Trial.draw(words.seed + number, words.strategies, words.kinds) for number in range(words.faults)]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        results = run_all(trials, Path(folder), words.jobs)
    print_table(results)
    sys.exit(any(result.violations for result in results))


def _names(allowed: Sequence[str] | dict[str, object]):
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; expected some of {', '.join(allowed)}")
        return names

    return parse


def run_all(trials: Sequence[Trial], work: Path, jobs: int) -> list[Result]:
    """Run the undisturbed runs first, then all trials, and print each when it is over."""
    compared = sorted({trial.strategy for trial in trials} - set(ASYNCHRONOUS))
    with ThreadPoolExecutor(jobs) as pool:
        weights = dict(zip(compared, pool.map(lambda name: undisturbed(name, work / name), compared), strict=True))

        def run(trial: Trial) -> Result:
            folder = work / f"trial-{trial.seed}"
            folder.mkdir()
            result = Disturbance(trial, folder, weights.get(trial.strategy)).execute()
            print(_line(result), *(f"    {text}" for text in result.violations), sep="\n", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            return result

        return list(pool.map(run, trials))


def _line(result: Result) -> str:
    trial = result.trial
    known = "" if result.detected_s is None else f"  known after {result.detected_s:.2f} s"
    verdict = "VIOLATION" if result.violations else "ok"
    what = f"{trial.fault:<13} {trial.victim:<8} step {trial.step:<3} restarts {trial.restarts}"
    return f"{verdict:<9} seed {trial.seed:<4} {trial.strategy:<21} {what}  exit {result.outcome}{known}"


def print_table(results: Sequence[Result]) -> None:
    """Print the faults, and how their trials ended."""
    print(f"\n{'fault':<13} {'trials':>6} {'violations':>10}   known after (median, most)   ended with")
    for fault in FAULTS:
        own = [result for result in results if result.trial.fault == fault]
        if not own:
            continue
        times = [result.detected_s for result in own if result.detected_s is not None]
        known = f"{statistics.median(times):.2f} s, {max(times):.2f} s" if times else ""
        ends = collections.Counter(result.outcome for result in own)
        told = ", ".join(f"{end}: {count}" for end, count in ends.most_common())
        print(f"{fault:<13} {len(own):>6} {sum(bool(each.violations) for each in own):>10}   {known:<26}   {told}")


if __name__ == "__main__":
    main()
