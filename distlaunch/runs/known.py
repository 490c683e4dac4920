"""Runs with their settings, as `runs` and `compare` show them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distlaunch.base.errors import ConfigError
from distlaunch.base.event_files import read_times
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.listing import JobsOf, RunSummary, summarize_all
from distlaunch.runs.paths import display_path
from distlaunch.runs.settings import Settings, read_settings

_RATE = "compile.optimizer.args.learning_rate"


@dataclass(frozen=True)
class KnownRun:
    """A run with its settings, which are empty for a script or a damaged config."""

    summary: RunSummary
    settings: Settings

    @property
    def has_values(self) -> bool:
        """Return True if the run has completed an epoch with a finite value."""
        return bool(self.summary.best)


def with_settings(runs: Sequence[RunSummary]) -> tuple[list[KnownRun], list[str]]:
    """Return runs with their settings, and a warning for each run that is damaged."""
    found, warnings = list[KnownRun](), list[str]()
    has_rates = False
    for summary in runs:
        settings, run = Settings(), RunDir(summary.path)
        try:
            settings = read_settings(run)
        except (ConfigError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else _first_problem(error)
            warnings.append(f"{display_path(summary.path)}: config.yaml: {why}; its settings are not compared")
        found.append(KnownRun(summary, settings))
        has_rates |= _RATE in settings
    return [_with_rate(run) for run in found] if has_rates else found, warnings


def _with_rate(run: KnownRun) -> KnownRun:
    """Return the run with the learning rate that it had by default, so that it can be compared with others."""
    rate = run.summary.learning_rate
    if not run.settings or rate is None or any(key == _RATE or key.startswith(f"{_RATE}.") for key in run.settings):
        return run
    return KnownRun(run.summary, {**run.settings, _RATE: rate})


def read_runs(
    runs: Sequence[RunDir],
    now: float,
    jobs_of: JobsOf,
    select: Callable[[Sequence[RunSummary]], Sequence[RunSummary]] = lambda found: found,
) -> tuple[list[KnownRun], list[str], int]:
    """Read the summaries and settings of runs.

    Args:
        now: see `listing.summarize`.
        jobs_of: see `listing.find_runs`.
        select: chooses runs by their summaries, before their settings are read.

    Returns:
        The runs in the order of their starts, warnings about runs that are damaged or cannot be read, and the number of
        runs that `select` left out.
    """
    readable, warnings = list[RunDir](), list[str]()
    if locked := [display_path(run.path) for run in runs if not run.is_readable()]:
        warnings.append(f"permission denied, so left out: {', '.join(locked)}")
    for run in (run for run in runs if run.is_readable()):
        if not run.events.exists() or os.access(run.events, os.R_OK):
            readable.append(run)
        else:
            warnings.append(f"{display_path(run.path)}: events.jsonl: permission denied; the run is left out")
    summaries = summarize_all(readable, now, jobs_of, goodput=True)
    selected = select(summaries)
    found, more = with_settings(selected)
    for each in found:
        path = RunDir(each.summary.path).events
        if not each.has_values and path.exists() and path.stat().st_size and not read_times(path):
            more.append(f"{display_path(each.summary.path)}: events.jsonl: it has no event that can be read")
    return found, [*warnings, *more], len(summaries) - len(selected)


def _first_problem(error: ConfigError) -> str:
    problem = error.problems[0]
    line = problem.source.rpartition(":")[2] if problem.source else ""
    return f"line {line}: {problem.message}" if line.isdigit() else problem.message
