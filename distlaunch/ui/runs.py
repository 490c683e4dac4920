"""Prints runs as a table for `distlaunch runs`, and the end of a run for `distlaunch stop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.live import Live
from rich.text import Text

from distlaunch.base import strict_json
from distlaunch.base.plural import count
from distlaunch.runs.known import KnownRun
from distlaunch.runs.listing import RunSummary
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import KILLED, PENDING, RUNNING, SCRIPT, SUBMITTED
from distlaunch.runs.settings import differing_keys, setting_text, short_names
from distlaunch.ui import words
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.lines import STATUS_STYLES
from distlaunch.ui.tables import fitting_columns, shortened

_STYLES = {**STATUS_STYLES, RUNNING: "cyan bold", KILLED: "red bold", PENDING: "cyan", SUBMITTED: "cyan"}
_MOST_VALUES = 2
_LONGEST_SETTING = 30  # characters of a value in the table
_INTERVAL_S = 1.0
"""Interval between two updates of the live table. Updates take at most a tenth of the time."""
_UNLIMITED = 1_000_000
_HEADS = ("run", "status", "strategy", "epoch", "step", "started", "time", "attempts")
NO_CHECKPOINT = "from the beginning: there is no checkpoint"


def print_runs(console: JobConsole, runs: Sequence[KnownRun], sorted_by: str | None = None) -> None:
    """Print a line per run, the status in its color.

    Args:
        sorted_by: the key by which the runs are sorted; its column is the most important one.
    """
    lines, left_out = _lines(console, runs, sorted_by)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if left_out and console.writes_to_terminal:
        console.print(Text(left_out, style="dim"), highlight=False)


def follow_runs(
    console: JobConsole,
    list_runs: Callable[[], list[KnownRun]],
    sorted_by: str | None = None,
    *,
    reverse: bool = False,
) -> NoReturn:
    """Show the runs as a live table, until Ctrl-C raises KeyboardInterrupt.

    Args:
        list_runs: returns the runs now.
        sorted_by: see `print_runs`.
        reverse: whether the runs are in reverse order. If `sorted_by` is None, the newest run then comes first.
    """
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            runs = list_runs()
            live.update(_live_table(console, runs, sorted_by, reverse=reverse), refresh=True)
            time.sleep(max(_INTERVAL_S, 9 * (time.monotonic() - began)))


def _live_table(console: JobConsole, runs: Sequence[KnownRun], sorted_by: str | None, *, reverse: bool) -> Text:
    """Return the table, cut to the height of the terminal: the first runs of a given order, or the newest ones."""
    if not runs:
        return Text("no runs yet", style="dim")
    lines, _ = _lines(console, runs, sorted_by)
    head, rows = lines[0], lines[1:]
    if len(rows) > (most := max(1, console.height - 3)):
        more = Text(f"... and {count(len(rows) - most, 'other run')}", style="dim")
        rows = [more, *rows[-most:]] if sorted_by is None and not reverse else [*rows[:most], more]
    return Text("\n", no_wrap=True, overflow="crop").join([head, *rows])


def _lines(console: JobConsole, runs: Sequence[KnownRun], sorted_by: str | None) -> tuple[list[Text], str]:
    """Return the lines of the table, and a note on the columns that do not fit the terminal."""
    summaries = [run.summary for run in runs]
    # the kind of the strategy has a column in any case
    keys = [key for key in differing_keys([run.settings for run in runs]) if key != "strategy.kind"]
    names = short_names(keys, _HEADS)

    def is_sorted(key: str) -> bool:
        return sorted_by is not None and f".{key}".endswith(f".{sorted_by}")

    # head, cells, rank of importance, right-aligned
    table: list[tuple[str, Sequence[str], int, bool]] = [
        ("run", [_name(run) for run in summaries], 0, False),
        ("status", [run.status for run in summaries], 1, False),
        ("strategy", [run.strategy for run in summaries], 8, False),
        ("epoch", [_epochs(run) for run in summaries], 4, True),
        ("step", [f"{run.step:,}" for run in summaries], 10, True),
        ("last values", [words.metrics(_first_values(run)) for run in summaries], 7, False),
        *(
            (
                f"best {name}",
                [best_value(run, name) for run in summaries],
                1 if name == sorted_by else 2 + 4 * number,
                True,
            )
            for number, name in enumerate(_first_metrics(summaries, sorted_by))
        ),
        *(
            (names[key], [setting_of(run, key, _LONGEST_SETTING) for run in runs], 1 if is_sorted(key) else 3, False)
            for key in keys
        ),
        ("started", [time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) for run in summaries], 6, False),
        ("time", [words.duration(run.seconds) for run in summaries], 5, True),
        ("attempts", [str(run.attempts) for run in summaries], 9, True),
    ]
    order = sorted(range(len(table)), key=lambda number: table[number][2])
    lines, left_out = fitting_columns(
        [head for head, *_ in table],
        list(zip(*(cells for _, cells, *_ in table), strict=True)),
        console.width if console.writes_to_terminal else _UNLIMITED,
        order,
        right=[number for number, (*_, right) in enumerate(table) if right],
    )
    texts = [Text(lines[0], style="dim")]
    for run, line in zip(summaries, lines[1:], strict=True):
        text = Text(line)
        # search after the name, which may contain the same word
        at = line.find(run.status, len(_name(run)))
        if at >= 0:
            text.stylize(_STYLES.get(run.status, "bold"), at, at + len(run.status))
        texts.append(text)
    return texts, f"left out, since the terminal has {console.width} columns: {', '.join(left_out)}" if left_out else ""


def runs_json(runs: Sequence[KnownRun]) -> str:
    """Return the runs as one JSON array, each with its settings that differ from those of other runs."""
    keys = differing_keys([run.settings for run in runs])
    plain = [
        {**run.summary.to_plain(), "settings": {key: run.settings[key] for key in keys if key in run.settings}}
        for run in runs
    ]
    return strict_json.dumps(plain, indent=2)


def how_it_ended(run: RunSummary, *, stopped: bool, has_checkpoint: bool) -> str:
    """Return the output of `stop`: `runs/job: stopped at step 40`, and how to continue."""
    name = display_path(run.path)
    is_script = run.strategy == SCRIPT  # the steps of a script are unknown
    at = f"at step {run.step:,}" if run.step else "before the first step"
    how = run.status if is_script else f"{run.status} {at}"
    if not stopped:
        return f"{name} is not running: {how}"
    why = f" ({run.culprit}: {run.reason})" if run.culprit else ""
    text = f"{name}: {how}{why}"
    if run.status == "done" or is_script:
        return text
    command = f"distlaunch {'submit' if run.job else 'train'} {name} --resume"
    return f"{text}\nnext  {command}" + ("" if has_checkpoint else f"  ({NO_CHECKPOINT})")


def _epochs(run: RunSummary) -> str:
    return f"{run.epoch}/{run.epochs}" if run.epochs is not None else str(run.epoch)


def _first_values(run: RunSummary) -> dict[str, float]:
    """Return the loss and the first metric, with their validation values; `report` shows all of them."""
    names = [name for name in run.logs if not name.startswith("val_")][:_MOST_VALUES]
    return {name: value for name, value in run.logs.items() if name.removeprefix("val_") in names}


def _first_metrics(runs: Sequence[RunSummary], sorted_by: str | None) -> list[str]:
    """Return the metrics whose best values are shown: the first ones, of the validation if there is one."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.best))
    validated = [name for name in metrics if name.startswith("val_")] or metrics
    first = [name for name in metrics if name == sorted_by]
    return list(dict.fromkeys([*first, *validated]))[:_MOST_VALUES]


def best_value(run: RunSummary, metric: str) -> str:
    """Return the best value of a metric with its epoch, from 1: `0.1277 (5)`; empty if there is none."""
    best = run.best.get(metric)
    return "" if best is None else f"{words.number(best.value)} ({best.epoch + 1})"


def setting_of(run: KnownRun, key: str, longest: int) -> str:
    """Return a setting in at most `longest` characters; empty if the run has none."""
    if key not in run.settings:
        return ""
    return shortened(display_path(setting_text(run.settings[key])), longest)


def _name(run: RunSummary) -> str:
    return display_path(run.path)
