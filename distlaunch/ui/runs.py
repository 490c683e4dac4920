"""Prints runs as a table for `distlaunch runs`, and the end of a run for `distlaunch stop`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from distlaunch.base import strict_json
from distlaunch.runs.listing import RunSummary
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import KILLED, PENDING, RUNNING, SCRIPT, SUBMITTED
from distlaunch.ui import words
from distlaunch.ui.progress.lines import STATUS_STYLES
from distlaunch.ui.tables import columns

_STYLES = {**STATUS_STYLES, RUNNING: "cyan bold", KILLED: "red bold", PENDING: "cyan", SUBMITTED: "cyan"}
_HEAD = ("run", "status", "strategy", "epoch", "step", "last values", "started", "time", "attempts")
_RIGHT = {3, 4, 7, 8}
_MOST_VALUES = 2
NO_CHECKPOINT = "from the beginning: there is no checkpoint"


def print_runs(console: Console, runs: Sequence[RunSummary]) -> None:
    """Print a line per run, the status in its colour."""
    head, *lines = columns(_HEAD, [_row(run) for run in runs], right=_RIGHT)
    console.print(Text(head, style="dim"), soft_wrap=True, highlight=False)
    for run, line in zip(runs, lines, strict=True):
        text = Text(line)
        # search after the name, which may contain the same word
        at = line.index(run.status, len(_name(run)))
        text.stylize(_STYLES.get(run.status, "bold"), at, at + len(run.status))
        console.print(text, soft_wrap=True, highlight=False)


def runs_json(runs: Sequence[RunSummary]) -> str:
    """Return the runs as one JSON array."""
    return strict_json.dumps([run.to_plain() for run in runs], indent=2)


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


def _row(run: RunSummary) -> tuple[str, ...]:
    # show only the loss and the first metric; `report` shows all of them
    names = [name for name in run.logs if not name.startswith("val_")][:_MOST_VALUES]
    logs = {name: value for name, value in run.logs.items() if name.removeprefix("val_") in names}
    return (
        _name(run),
        run.status,
        run.strategy,
        f"{run.epoch}/{run.epochs}" if run.epochs is not None else str(run.epoch),
        f"{run.step:,}",
        words.metrics(logs),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
        words.duration(run.seconds),
        str(run.attempts),
    )


def _name(run: RunSummary) -> str:
    return display_path(run.path)
