"""Which task holds which variable, as tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.ui import words
from distlaunch.ui.columns import columns


def placement_lines(variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each part of each variable, given as in the event VariablesPlaced; on a mesh, one for each variable,
    with the mesh axis of each dimension and the size on each device."""
    rows: list[tuple[str, ...]] = []
    for variable in variables:
        name, shape = str(variable["name"]), _shape(variable["shape"])
        if "layout" in variable:
            devices, each = len(variable["parts"]), variable["parts"][0]["bytes"]
            rows.append((name, shape, f"{devices} devices", _layout(variable["layout"]), words.size(each)))
            continue
        for number, part in enumerate(variable["parts"]):
            head = ("", "") if number else (name, shape)
            rows.append((*head, str(part["task"]), _rows(part["rows"]), words.size(part["bytes"])))
    return columns(("variable", "shape", "task", "rows", "size"), rows, right={4})


def task_lines(variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each task: how many variables, or parts of them, it holds, and their size together."""
    totals = bytes_per_task(variables)
    counts = dict.fromkeys(totals, 0)
    for variable in variables:
        for part in variable["parts"]:
            counts[part["task"]] += 1
    rows = [(task, f"{counts[task]:,}", words.size(total)) for task, total in totals.items()]
    return columns(("task", "variables", "size"), rows, right={1, 2})


def bytes_per_task(variables: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What each task holds altogether, in the tasks' order."""
    totals: dict[str, int] = {}
    for variable in variables:
        for part in variable["parts"]:
            totals[part["task"]] = totals.get(part["task"], 0) + part["bytes"]
    return {task: totals[task] for task in sorted(totals, key=_order)}


def _order(task: str) -> tuple[str, int]:
    job, _, index = task.partition(":")
    return job, int(index) if index.isdigit() else 0


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size}" for size in shape) or "scalar"


def _layout(axes: Sequence[str | None]) -> str:
    return f"[{', '.join(axis or '~' for axis in axes)}]" if any(axes) else "all"


def _rows(rows: Sequence[int] | None) -> str:
    return "all" if rows is None else f"{rows[0]} to {rows[1] - 1}"
