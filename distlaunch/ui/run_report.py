"""Prints the report on a run as tables, for `distlaunch report`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from distlaunch.base import strict_json
from distlaunch.base.events import EpochEnded, Evaluated
from distlaunch.base.plural import count
from distlaunch.runs.bottleneck import find_bottleneck
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import AttemptReport, RunReport
from distlaunch.ui import words
from distlaunch.ui.placement import bytes_per_task, placement_sections
from distlaunch.ui.progress.lines import (
    STATUS_STYLES,
    data_source,
    goodput_text,
    numbers_text,
    optimizer_text,
    restarts,
    skipped,
    step_times,
    training_start,
)
from distlaunch.ui.tables import columns, line_style_for

_SHOWN_LOSS = 0.01
"""Smallest share of a run's time for which the report names its category."""
_SHORTEST_S = 1.0
"""Shortest run for which the report shows goodput."""


def print_report(console: Console, report: RunReport) -> None:
    """Print the report: the current facts, then tables of attempts, epochs, checkpoints and results."""
    for name, value, style in facts(report):
        _print(console, Text.assemble((f"{name:<9}  ", "dim"), (value, style)))
    _section(console, _attempt_lines(report.attempts))
    _section(console, _epoch_lines(report.epochs))
    _section(console, _checkpoint_lines(report))
    _section(console, _result_lines("evaluator", report.evaluator))
    _section(console, _result_lines("evaluate", report.evaluations))
    if report.variables:
        for section in placement_sections(report.variables, report.mesh, line_style_for(console.encoding)):
            _section(console, section)


def report_json(report: RunReport) -> str:
    """Return the report as one JSON object."""
    return strict_json.dumps({**report.to_plain(), "bytes_per_task": bytes_per_task(report.variables)}, indent=2)


def facts(report: RunReport) -> list[tuple[str, str, str]]:
    """Return names and values of facts about a run, each with a style for a terminal."""
    rows = [
        ("run", display_path(report.path), ""),
        ("script", shlex.join(report.command), "")
        if report.command
        else (
            "strategy",
            training_start(report.training) if report.training else report.strategy,
            "",
        ),
        ("status", report.status, STATUS_STYLES.get(report.status, "bold")),
    ]
    failed = [attempt for attempt in report.attempts if attempt.culprit and attempt.is_run]
    if report.status == "failed" and failed:
        where = f" on {failed[-1].host}" if failed[-1].host else ""
        rows += [("failed", f"{failed[-1].culprit}{where}: {failed[-1].reason}", "")]
        rows += [("log", display_path(failed[-1].log), "")] if failed[-1].log else []
    if again := _restarts(report.attempts):
        rows.append(("restarts", again, ""))
    if report.data is not None:
        rows.append(("data", data_source(report.data), ""))
    if report.skipped:
        rows.append(("left out", skipped(report.skipped), "yellow"))
    failure = failed[-1].reason if report.status == "failed" and failed else ""
    if numbers := numbers_text(report.numbers, failure):
        differs = any(event.status == "differs" for event in report.numbers)
        rows.append(("numbers", numbers, "red" if differs else ""))
    if report.training is not None and (optimizer := optimizer_text(report.training, report.epochs)):
        rows.append(("optimizer", optimizer, ""))
    if report.timed:
        rows.append(("steps", step_times(report.timed, report.hosts), ""))
    if slow := find_bottleneck(report.timed):
        rows.append(("input", str(slow), "yellow"))
    if report.goodput is not None and report.goodput.wall_s >= _SHORTEST_S:
        losses = {name: share for name, share in report.goodput.losses.items() if share >= _SHOWN_LOSS}
        rows.append(("goodput", goodput_text(report.goodput, losses), ""))
    rows += [("export", f"{display_path(path)} ({kind})", "") for kind, path in report.exports.items()]
    rows += [("export", f"failed: {report.export_failure}", "red")] if report.export_failure else []
    return rows


def _restarts(attempts: Sequence[AttemptReport]) -> str:
    """Return the number of restarts of single tasks. The table of attempts shows the restarts of the job."""
    total: dict[str, int] = {}
    for attempt in attempts:
        for task, number in attempt.restarts.items():
            total[task] = total.get(task, 0) + number
    return restarts(total, 0)


def _attempt_lines(attempts: Sequence[AttemptReport]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for attempt in attempts:
        steps = f"{attempt.first_step:,} to {attempt.last_step:,}" if attempt.first_step is not None else ""
        took = words.duration(attempt.seconds) if attempt.seconds is not None else ""
        status = attempt.status if attempt.is_run else f"{attempt.mode}: {attempt.status}"
        why = f"{attempt.culprit}: {attempt.reason}" if attempt.culprit else ""
        rows.append((str(attempt.attempt), status, steps, took, restarts(attempt.restarts, 0), why))
    return _without_empty(("attempt", "ended", "steps", "after start", "restarts", "failed first"), rows, right={0, 3})


def _epoch_lines(epochs: Sequence[EpochEnded]) -> list[str]:
    """Return a table of all logged values, each next to its validation value."""
    names = _log_names([epoch.logs for epoch in epochs])
    rows = [
        (
            str(epoch.epoch + 1),
            f"{epoch.step:,}",
            words.duration(epoch.seconds),
            *(words.value(epoch.logs.get(name)) for name in names),
        )
        for epoch in epochs
    ]
    return columns(("epoch", "step", "time", *names), rows, right=range(len(names) + 3)) if rows else []


def _checkpoint_lines(report: RunReport) -> list[str]:
    rows = [
        (
            f"{saved.step:,}",
            words.size(saved.num_bytes),
            f"{display_path(saved.path)}{' (best)' if saved is report.best else ''}",
        )
        for saved in report.all_checkpoints
    ]
    return columns(("checkpoint", "size", "path"), rows, right={0, 1}) if rows else []


def _result_lines(name: str, results: Sequence[Evaluated]) -> list[str]:
    names = _log_names([result.logs for result in results])
    rows = [
        (f"{result.step:,}", result.split, *(words.value(result.logs.get(each)) for each in names))
        for result in results
    ]
    right = {0, *range(2, len(names) + 2)}
    return columns((f"{name}: step", "split", *names), rows, right=right) if rows else []


def _log_names(logs: Sequence[dict[str, float]]) -> list[str]:
    """Return all names in order of appearance, each followed by the name of its validation value."""
    found = dict.fromkeys(name for each in logs for name in each)
    plain = dict.fromkeys(name.removeprefix("val_") for name in found)
    return [name for base in plain for name in (base, f"val_{base}") if name in found]


def _without_empty(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    """Return a table without its empty columns."""
    if not rows:
        return []
    kept = [number for number in range(len(head)) if any(row[number] for row in rows)]
    aligned = {at for at, number in enumerate(kept) if number in right}
    return columns([head[number] for number in kept], [[row[n] for n in kept] for row in rows], right=aligned)


def _section(console: Console, lines: Sequence[str]) -> None:
    if lines:
        _print(console, Text(""))
        _print(console, Text.assemble((lines[0], "dim"), "\n" if len(lines) > 1 else "", "\n".join(lines[1:])))


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def print_checkpoint(console: Console, listing: dict[str, Any]) -> None:
    """Print a line about the checkpoint and a line for each variable.

    Args:
        listing: the result of `jobs.list_checkpoint`.
    """
    variables = listing["variables"]
    rows = [
        (
            variable["name"],
            words.shape(variable["shape"]),
            variable["dtype"],
            words.size(variable["bytes"]),
            "" if variable["norm"] is None else words.value(variable["norm"]),
        )
        for variable in variables
    ]
    total = words.size(sum(variable["bytes"] for variable in variables))
    after = f"step {listing['step']:,}, in epoch {listing['epoch'] + 1}"
    head = f"{display_path(listing['path'])}: {after}; {count(len(variables), 'variable')}, {total}"
    for line in (head, "", *columns(("variable", "shape", "type", "size", "norm"), rows, right={3, 4})):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
