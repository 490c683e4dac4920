"""Prints runs side by side for `distlaunch compare`: a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from distlaunch.base import strict_json
from distlaunch.base.metric_names import LEARNING_RATE, falls
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.known import KnownRun
from distlaunch.runs.paths import display_path
from distlaunch.runs.settings import differing_keys, setting_text, short_names
from distlaunch.ui import words
from distlaunch.ui.console import JobConsole
from distlaunch.ui.runs import best_value, setting_of
from distlaunch.ui.tables import fitting_columns, shortened

_FACTS = ("run", "status", "epoch", "time", "examples/s", "goodput")
_LONGEST_SETTING = 40  # characters of a value in the table
_MOST_BEST_LINES = 3


@dataclass(frozen=True)
class _Column:
    """A column of the table. Columns with a lower `rank` are more important."""

    head: str
    cells: Sequence[str]
    rank: int
    right: bool = True


def print_comparison(console: JobConsole, runs: Sequence[KnownRun], sorted_by: str | None = None) -> None:
    """Print a table of runs with as many columns as fit the terminal, and the runs that have the best values.

    Args:
        sorted_by: the key by which the runs are sorted; its column is the most important one.
    """
    table = _columns(runs, sorted_by)
    width = console.width
    order = sorted(range(len(table)), key=lambda number: table[number].rank)
    right = [number for number, column in enumerate(table) if column.right]
    rows = list(zip(*(column.cells for column in table), strict=True))
    lines, left_out = fitting_columns([column.head for column in table], rows, width, order, right=right)
    _print(console, Text(lines[0], style="dim"))
    for line in lines[1:]:
        _print(console, Text(line))
    best = [line for _, line in _best_lines(runs, sorted_by)]
    for line in ["", *best] if best else []:
        _print(console, Text(shortened(line, width), style="bold"))
    if left_out:
        text = f"left out, since the terminal has {width} columns: {', '.join(left_out)}; --csv and --json have all"
        console.print(Text(text, style="dim"), highlight=False)


def comparison_page(runs: Sequence[KnownRun], sorted_by: str | None = None) -> str:
    """Return a page with the table of all columns, and the curves of all runs in the same charts."""
    # imported here, since it takes as long as the rest of the command
    import distlaunch
    from distlaunch.ui.html_report.data import curves_of
    from distlaunch.ui.html_report.page import document

    table, best = _columns(runs, sorted_by), _best_lines(runs, sorted_by)
    names = [display_path(run.summary.path) for run in runs]
    curves = [{"name": name, **curves_of(RunDir(run.summary.path))} for name, run in zip(names, runs, strict=True)]
    return document(
        "comparison",
        {
            "name": f"Comparison of {len(runs)} runs",
            "version": distlaunch.__version__,
            "heads": [column.head for column in table],
            "rows": list(zip(*(column.cells for column in table), strict=True)),
            "best": [line for _, line in best],
            "marked": display_path(best[0][0].summary.path) if best else None,
            "order": f"sorted by {sorted_by}" if sorted_by else "in the order of their starts",
            "started": _dates(runs),
            "shared": _shared(runs),
            "runs": curves,
        },
    )


def comparison_csv(runs: Sequence[KnownRun]) -> str:
    """Return the comparison as CSV, with complete names and unrounded numbers. Epochs count from 1."""
    keys, metrics = differing_keys([run.settings for run in runs]), _metrics(runs)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    of_metrics = [
        f"{which}{name}{what}"
        for name in metrics
        for which, what in (("best ", ""), ("best ", " epoch"), ("best ", " step"), ("last ", ""))
    ]
    of_runs = ["epoch", "step", "seconds", "examples_per_s", "goodput", "started", "attempts"]
    writer.writerow(["run", "status", *keys, *of_metrics, *of_runs])
    for run in runs:
        summary = run.summary
        values = list[Any]()
        for name in metrics:
            best = summary.best.get(name)
            values += ["", "", ""] if best is None else [best.value, best.epoch + 1, best.step]
            values.append(_last(run).get(name, ""))
        writer.writerow([
            display_path(summary.path), summary.status,
            *(setting_text(run.settings[key]) if key in run.settings else "" for key in keys), *values,
            summary.epoch, summary.step, summary.seconds,
            "" if summary.examples_per_s is None else summary.examples_per_s,
            "" if summary.goodput is None else summary.goodput.share,
            summary.started, summary.attempts,
        ])  # fmt: skip
    return out.getvalue()


def comparison_json(runs: Sequence[KnownRun]) -> str:
    """Return the comparison as one JSON object."""
    keys = differing_keys([run.settings for run in runs])
    return strict_json.dumps({"keys": keys, "runs": [_plain(run, keys) for run in runs]}, indent=2)


def _plain(run: KnownRun, keys: Sequence[str]) -> dict[str, Any]:
    summary = run.summary
    return {
        "run": summary.path,
        "status": summary.status,
        "settings": {key: run.settings[key] for key in keys if key in run.settings},
        "best": {name: value._asdict() for name, value in summary.best.items()},
        "last": _last(run),
        "epoch": summary.epoch,
        "step": summary.step,
        "seconds": summary.seconds,
        "examples_per_s": summary.examples_per_s,
        "goodput": summary.goodput and summary.goodput.to_plain(),
        "started": summary.started,
        "attempts": summary.attempts,
    }


def _dates(runs: Sequence[KnownRun]) -> str:
    """Return the days on which the first and the last run have started, such as `2026-11-25 to 2026-11-27`."""
    times = [run.summary.started for run in runs if run.summary.started]
    days = [time.strftime("%Y-%m-%d", time.localtime(each)) for each in (min(times), max(times))] if times else []
    return " to ".join(dict.fromkeys(days))


def _shared(runs: Sequence[KnownRun]) -> list[tuple[str, str]]:
    """Return the settings that are the same in all runs, except scripts, with their values."""
    known = [run for run in runs if run.settings]
    return [
        (key, setting_text(value))
        for key, value in (known[0].settings if known else {}).items()
        if all(key in run.settings and run.settings[key] == value for run in known)
    ]


def _columns(runs: Sequence[KnownRun], sorted_by: str | None) -> list[_Column]:
    """Return the columns from left to right."""
    summaries, metrics = [run.summary for run in runs], _metrics(runs)
    validated = [name for name in metrics if name.startswith("val_")] or metrics
    keys = differing_keys([run.settings for run in runs])
    names = short_names(keys, [*_FACTS, *metrics])
    found = [_Column("run", [display_path(each.path) for each in summaries], 0, right=False)]
    is_done = all(each.status == "done" for each in summaries)
    found.append(_Column("status", [each.status for each in summaries], 90 if is_done else 40, right=False))
    of_keys = {key: [setting_of(run, key, _LONGEST_SETTING) for run in runs] for key in keys}
    ranks = {key: number for number, key in enumerate(_most_telling(of_keys))}
    for key, cells in of_keys.items():
        is_sorted = sorted_by is not None and f".{key}".endswith(f".{sorted_by}")
        is_number = all(not cell or cell[0].isdigit() or cell[0] == "-" for cell in cells)
        found.append(_Column(names[key], cells, 1 if is_sorted else 10 + min(ranks[key], 25), right=is_number))
    for number, name in enumerate([*validated, *(name for name in metrics if name not in validated)]):
        rank = 1 if name == sorted_by else 2 if number == 0 else 50 if name in validated else 60
        found.append(_Column(f"best {name}", [best_value(run.summary, name) for run in runs], rank))
    for name in validated + [name for name in metrics if name not in validated]:
        found.append(_Column(f"last {name}", [words.value(_last(run).get(name)) for run in runs], 70))
    facts = {
        "epoch": [_epochs(run) for run in runs],
        "time": [words.duration(each.seconds) for each in summaries],
        "examples/s": ["" if each.examples_per_s is None else f"{each.examples_per_s:,.0f}" for each in summaries],
        "goodput": ["" if each.goodput is None else f"{each.goodput.share:.0%}" for each in summaries],
    }
    for rank, (name, cells) in zip((80, 51, 53, 52), facts.items(), strict=True):
        is_sorted = sorted_by is not None and name == sorted_by.replace("_per_", "/")
        found.append(_Column(name, cells, 1 if is_sorted else rank))
    return [column for column in found if any(column.cells)]


def _most_telling(cells: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the keys, each chosen because it best distinguishes the runs together with the keys before it.

    Args:
        cells: for each key, the values of all runs.
    """
    left, chosen = list(cells), list[str]()
    groups = [0] * max(map(len, cells.values()), default=0)
    while left:
        key = max(left, key=lambda key: len(set(zip(groups, cells[key], strict=True))))  # the first one of equal ones
        numbers = dict[tuple[int, str], int]()
        groups = [numbers.setdefault(pair, len(numbers)) for pair in zip(groups, cells[key], strict=True)]
        left.remove(key)
        chosen.append(key)
    return chosen


def _metrics(runs: Sequence[KnownRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in (*run.summary.best, *_last(run)))
    return [name for name in names if name != LEARNING_RATE]


def _last(run: KnownRun) -> dict[str, float]:
    """Return the values of the last complete epoch; empty before the first is complete."""
    return run.summary.logs if run.summary.epoch else {}


def _epochs(run: KnownRun) -> str:
    summary = run.summary
    return f"{summary.epoch}/{summary.epochs}" if summary.epochs is not None else str(summary.epoch)


def _best_lines(runs: Sequence[KnownRun], sorted_by: str | None) -> list[tuple[KnownRun, str]]:
    """Return the best run for each of a few metrics, with a line such as `best val_loss: runs/a, 0.1277 in epoch 5`.

    The first metric is the one that sorts the runs. Validation metrics follow or, if there are none, all metrics.
    """
    metrics = _metrics(runs)
    lines = list[tuple[KnownRun, str]]()
    validated = [name for name in metrics if name.startswith("val_")] or metrics
    for name in dict.fromkeys([*(name for name in metrics if name == sorted_by), *validated]):
        if len(lines) == _MOST_BEST_LINES:
            break
        known = [(run.summary.best[name], run) for run in runs if name in run.summary.best]
        if len(known) < 2:
            continue
        sign = 1 if falls(name) else -1
        # the earliest of equal runs, in whichever order the runs are shown
        best, run = min(known, key=lambda each: (sign * each[0].value, each[1].summary.started, each[1].summary.path))
        others = sum(value.value == best.value for value, _ in known) - 1
        line = f"best {name}: {display_path(run.summary.path)}, {words.number(best.value)} in epoch {best.epoch + 1}"
        line += f", as in {count(others, 'later run')}" if others else ""
        lines.append((run, line + _lost_checkpoint(run, best.step)))
    return lines


def _lost_checkpoint(run: KnownRun, step: int) -> str:
    """Return a note if the run has checkpoints, but not that of a step."""
    found = RunDir(run.summary.path)
    steps = found.checkpoint_steps()
    if not steps or step in steps:
        return ""
    best = found.best_checkpoint()
    return "" if best is not None and best[0] == step else "; its checkpoint is not kept (see checkpoint.best)"


def _print(console: JobConsole, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
