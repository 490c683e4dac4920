"""Sorts runs by a metric, a setting or a fact, for `runs` and `compare`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distlaunch.base.errors import UsageError
from distlaunch.base.metric_names import falls
from distlaunch.runs.known import KnownRun
from distlaunch.runs.listing import RunSummary
from distlaunch.runs.settings import differing_keys

_FACTS: Mapping[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "run": (lambda run: run.path, True),
    "status": (lambda run: run.status, True),
    "strategy": (lambda run: run.strategy, True),
    "epoch": (lambda run: run.epoch, False),
    "step": (lambda run: run.step, False),
    "started": (lambda run: run.started, True),
    "time": (lambda run: run.seconds, True),
    "examples_per_s": (lambda run: run.examples_per_s, False),
    "goodput": (lambda run: None if run.goodput is None else run.goodput.share, False),
}
"""Facts to sort by: a function that returns the value of a run, and True if small values come first."""


def sort_runs(runs: Sequence[KnownRun], key: str, *, reverse: bool = False) -> list[KnownRun]:
    """Return the runs in the order of a key. Runs without a value come last.

    Args:
        key: the name of a metric (the best values count, and the best run comes first), the key of a setting or its
        last part, such as `learning_rate`, or a fact such as `time`.
        reverse: whether to reverse the order.

    Raises:
        UsageError: no run has the key, or it is the last part of several settings.
    """
    value_of, rises = _values(runs, key)
    values = {id(run): value_of(run) for run in runs}
    known = [run for run in runs if _is_known(values[id(run)])]
    # numbers before texts, because Python does not compare them
    known.sort(key=lambda run: _comparable(values[id(run)]), reverse=reverse == rises)
    return [*known, *(run for run in runs if not _is_known(values[id(run)]))]


def _values(runs: Sequence[KnownRun], key: str) -> tuple[Callable[[KnownRun], Any], bool]:
    """Return a function that returns the value of a run, and whether small values come first."""
    if key in _FACTS:
        fact, rises = _FACTS[key]
        return (lambda run: fact(run.summary)), rises
    metrics = list(dict.fromkeys(name for run in runs for name in run.summary.best))
    if key in metrics:
        return (lambda run: run.summary.best[key].value if key in run.summary.best else None), falls(key) is True
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    found = [name for name in settings if name == key] or [name for name in settings if name.endswith(f".{key}")]
    differing = differing_keys([run.settings for run in runs])
    found = [name for name in found if name in differing] or found
    if len(found) > 1:
        raise UsageError(f"--sort: '{key}' is part of several keys: {', '.join(found)}; give one of them")
    if found:
        return (lambda run: run.settings.get(found[0])), True
    names = [*metrics, *_FACTS, *differing]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UsageError(
        f"--sort: got '{key}'; {hint}runs can be sorted by {', '.join(names)}, and by any key of the configs"
    )


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _comparable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))
