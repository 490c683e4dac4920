"""Finds the runs that a command names: by path, by name, by a pattern, or all runs in a folder."""

from __future__ import annotations

import datetime
import fnmatch
import glob
import os
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.listing import RunSummary
from distlaunch.runs.paths import RUNS_DIR, display_path

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S")


def named_runs(names: Sequence[str]) -> list[RunDir]:
    """Return the runs that were named, each once, in the order of the names.

    Args:
        names: each the path of a run, its name in the folder `runs`, a pattern for either (`lr-*`), or a folder of
            runs. If empty, all runs in the folder `runs` are returned.

    Raises:
        UsageError: a name stands for no run.
    """
    if not names and not Path(RUNS_DIR).is_dir():
        raise UsageError(f"there is no folder {RUNS_DIR} here; give the runs, or the folder that has them")
    found = [run for name in (names or [RUNS_DIR]) for run in _named(name)]
    return list({run.path: run for run in found}.values())


def run_named(name: str) -> RunDir:
    """Return the run with this path or, if there is none, with this name in the folder `runs`; it may not exist."""
    here, inside = RunDir(name), RunDir(Path(RUNS_DIR) / name)
    return inside if not _is_known(here) and _is_known(inside) else here


def _is_known(run: RunDir) -> bool:
    # a run that waits for its hosts has no files yet, but a launcher works on it
    return run.exists() or run.is_busy()


def open_run(name: str, *, may_wait: bool = False) -> RunDir:
    """Return an existing run; see `run_named`.

    Args:
        may_wait: whether the run may be waiting for its hosts, without any file yet.

    Raises:
        UsageError: there is none.
    """
    run = run_named(name)
    if run.exists() or (may_wait and run.is_busy()):
        return run
    what = "not a run directory (no config.yaml and no plan.json)"
    if not run.path.exists():
        what = f"there is no such run, neither here nor in {RUNS_DIR}"
    raise UsageError(f"{display_path(run.path)}: {what}; `distlaunch runs` lists the runs")


def _named(name: str) -> list[RunDir]:
    places = [Path(name), Path(RUNS_DIR) / name]
    run = next((RunDir(place) for place in places if _is_run(place)), None)
    if run is not None and not run.is_readable():
        raise UsageError(f"{display_path(run.path)}: permission denied")
    if run is not None:
        return [run]
    if glob.has_magic(name):
        for place in places:
            if matches := [RunDir(path) for path in sorted(glob.glob(str(place))) if _is_run(Path(path))]:
                return matches
        raise UsageError(f"{name}: no run matches, neither here nor in {RUNS_DIR}; `distlaunch runs` lists the runs")
    folder = Path(name)
    if folder.is_dir():
        if inner := [RunDir(path) for path in sorted(folder.iterdir()) if _is_run(path)]:
            return inner
        raise UsageError(f"{display_path(folder.absolute())}: there is no run in this folder")
    raise UsageError(f"{name}: there is no such run, neither here nor in {RUNS_DIR}; `distlaunch runs` lists the runs")


def _is_run(path: Path) -> bool:
    """Return True for a run, also for a folder that cannot be read and so may be one."""
    if path.name.startswith(".") or not os.access(path.parent, os.X_OK) or not path.is_dir():
        return False
    return not RunDir(path).is_readable() or RunDir(path).exists()


def filter_runs(
    runs: Sequence[RunSummary],
    *,
    statuses: Collection[str] = (),
    names: Collection[str] = (),
    since: float | None = None,
) -> list[RunSummary]:
    """Return the runs that fulfil all conditions.

    Args:
        statuses: the statuses to keep; empty for all.
        names: patterns, of which at least one must match the name of the run's folder, or, if the pattern has a `/`,
            its path. `*` matches within one folder's name. Empty for all names.
        since: the earliest start, in seconds since 1970.
    """
    return [
        run
        for run in runs
        if (not statuses or run.status in statuses)
        and (not names or any(_matches(run, name) for name in names))
        and (since is None or run.started >= since)
    ]


def _matches(run: RunSummary, pattern: str) -> bool:
    """Return whether a pattern fits the name of a run's folder, or its path if the pattern is one."""
    if "/" not in pattern:
        return fnmatch.fnmatchcase(Path(run.path).name, pattern)
    wanted = Path(pattern).parts
    for parts in (Path(display_path(run.path)).parts, Path(run.path).parts):
        if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            return True
    return False


def parse_since(text: str, now: float | None = None) -> float:
    """Return the seconds since 1970 of a date such as `2026-11-27` or `2026-11-27 14:30`, or of an age such as `12h`.

    Raises:
        ValueError: the text is neither.
    """
    now = time.time() if now is None else now
    if match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(m|h|d|w)", text.strip()):
        return now - float(match[1]) * _UNITS[match[2]]
    for form in _DATES:
        try:
            return datetime.datetime.strptime(text.strip(), form).timestamp()
        except (ValueError, OverflowError):
            continue
    raise ValueError(text)
