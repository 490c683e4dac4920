"""Which task holds which variable: tables of plain text, and pictures of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.ui import words
from distlaunch.ui.boxes import Pen
from distlaunch.ui.columns import columns
from distlaunch.ui.mesh import is_of_optimizer, layout_text, mesh_lines, variable_pictures

Variables = Sequence[Mapping[str, Any]]
_MOST_LINES = 16  # for devices that all hold as much


def placement_sections(variables: Variables, mesh: Mapping[str, Any] | None, pen: Pen) -> list[list[str]]:
    """All there is to show, from what the event VariablesPlaced has; `mesh` may be None on a mesh too, in old runs."""
    pictures = [variable_pictures(variables, pen)] if all("layout" in variable for variable in variables) else []
    return [*([mesh_lines(mesh, pen)] if mesh else []), placement_lines(variables), *pictures, task_lines(variables)]


def placement_lines(variables: Variables) -> list[str]:
    """A line for each part of each variable, given as in the event VariablesPlaced; on a mesh, one for each variable,
    with the mesh axis of each dimension and the size on each device."""
    rows: list[tuple[str, ...]] = []
    for variable in variables:
        name, shape = str(variable["name"]), words.shape(variable["shape"])
        if "layout" in variable:
            devices, each = len(variable["parts"]), variable["parts"][0]["bytes"]
            rows.append((name, shape, f"{devices}", _layout(variable["layout"]), words.size(each)))
            continue
        for number, part in enumerate(variable["parts"]):
            head = ("", "") if number else (name, shape)
            rows.append((*head, str(part["task"]), _rows(part["rows"]), words.size(part["bytes"])))
    on_mesh = any("layout" in variable for variable in variables)
    head = ("devices", "layout", "on each") if on_mesh else ("task", "rows", "size")
    return columns(("variable", "shape", *head), rows, right={4})


def task_lines(variables: Variables) -> list[str]:
    """A line for each task: how many variables, or parts of them, it holds, their size, and the optimizer's share."""
    totals, of_optimizer = bytes_per_task(variables), bytes_per_task([v for v in variables if is_of_optimizer(v)])
    counts = dict.fromkeys(totals, 0)
    for variable in variables:
        for part in variable["parts"]:
            counts[part["task"]] += 1
    rows = []
    for task, total in totals.items():
        slots = of_optimizer.get(task, 0)
        sizes = (words.size(size) for size in (total - slots, slots, total))
        rows.append((task, f"{counts[task]:,}", *sizes))
    if len(rows) > _MOST_LINES and len({row[1:] for row in rows}) == 1:
        rows = [(f"each of {len(rows)}", *rows[0][1:])]
    return columns(("task", "variables", "weights", "optimizer", "total"), rows, right={1, 2, 3, 4})


def bytes_per_task(variables: Variables) -> dict[str, int]:
    """What each task holds altogether, in the tasks' order."""
    totals: dict[str, int] = {}
    for variable in variables:
        for part in variable["parts"]:
            totals[part["task"]] = totals.get(part["task"], 0) + part["bytes"]
    return {task: totals[task] for task in sorted(totals, key=_order)}


def _order(task: str) -> tuple[str, int]:
    job, _, index = task.partition(":")
    return job, int(index) if index.isdigit() else 0


def _layout(axes: Sequence[str | None]) -> str:
    return layout_text(axes) if any(axes) else "all"


def _rows(rows: Sequence[int] | None) -> str:
    return "all" if rows is None else f"{rows[0]} to {rows[1] - 1}"
