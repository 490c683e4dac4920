"""Tables and pictures that show on which task or device each variable is placed."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from distlaunch.base.plural import count
from distlaunch.ui import words
from distlaunch.ui.tables import LineStyle, columns, grid, kept

Variables = Sequence[Mapping[str, Any]]
_MAX_EQUAL_TASKS = 16  # if more tasks than this hold equal amounts, one line describes them all
Axes = Sequence[str | None]
_Cell = tuple[int, int]
_MAX_NAMES = 3  # variables that a picture names; the others are counted
_MAX_GRIDS = 4  # grids that are drawn for a mesh of three axes
_MAX_WIDE_COLUMNS = 4  # maximum width of a cell, in columns
_DEVICES_IN_WIDE_CELL, _DEVICES_IN_NARROW_CELL = 8, 3


def placement_sections(variables: Variables, mesh: Mapping[str, Any] | None, style: LineStyle) -> list[list[str]]:
    """Return all sections for the content of a VariablesPlaced event."""
    pictures = [variable_pictures(variables, style)] if all("layout" in variable for variable in variables) else []
    return [*([mesh_lines(mesh, style)] if mesh else []), placement_lines(variables), *pictures, task_lines(variables)]


def placement_lines(variables: Variables) -> list[str]:
    """Return a line for each shard of each variable.

    On a mesh, return a line for each variable, with the mesh axis of each dimension and the size on each device.

    Args:
        variables: the variables as in a VariablesPlaced event.
    """
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
    """Return a line for each task: the number of variables or shards, and the bytes of weights and optimizer."""
    totals = bytes_per_task(variables)
    optimizer_bytes = bytes_per_task([v for v in variables if _belongs_to_optimizer(v)])
    counts = dict.fromkeys(totals, 0)
    for variable in variables:
        for part in variable["parts"]:
            counts[part["task"]] += 1
    rows: list[tuple[str, ...]] = []
    for task, total in totals.items():
        slots = optimizer_bytes.get(task, 0)
        sizes = (words.size(size) for size in (total - slots, slots, total))
        rows.append((task, f"{counts[task]:,}", *sizes))
    if len(rows) > _MAX_EQUAL_TASKS and len({row[1:] for row in rows}) == 1:
        rows = [(f"each of {len(rows)}", *rows[0][1:])]
    return columns(("task", "variables", "weights", "optimizer", "total"), rows, right={1, 2, 3, 4})


def bytes_per_task(variables: Variables) -> dict[str, int]:
    """Return the total bytes of each task, in the tasks' order."""
    totals: dict[str, int] = {}
    for variable in variables:
        for part in variable["parts"]:
            totals[part["task"]] = totals.get(part["task"], 0) + part["bytes"]
    return {task: totals[task] for task in sorted(totals, key=_order)}


def _order(task: str) -> tuple[str, int]:
    job, _, index = task.partition(":")
    return job, int(index) if index.isdigit() else 0


def _layout(axes: Sequence[str | None]) -> str:
    return _layout_text(axes) if any(axes) else "all"


def _rows(rows: Sequence[int] | None) -> str:
    return "all" if rows is None else f"{rows[0]} to {rows[1] - 1}"


def mesh_lines(mesh: Mapping[str, Any], style: LineStyle) -> list[str]:
    """Return the lines that show the mesh and how a batch of inputs is split over it."""
    names, sizes, devices = mesh["axes"], mesh["shape"], [str(device) for device in mesh["devices"]]
    axes = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return [
        f"mesh: {axes}, {count(len(devices), 'device')}",
        *_grids(names, sizes, devices, style),
        "",
        *_inputs(mesh, devices, style),
    ]


def _grids(names: Sequence[str], sizes: Sequence[int], devices: Sequence[str], style: LineStyle) -> list[str]:
    """Return the lines of a grid of the last two axes for each position on the other axes."""
    *outer, height, width = (1, *sizes) if len(sizes) == 1 else sizes
    if len(sizes) == 1 and width > _MAX_WIDE_COLUMNS:
        height, width = width, 1  # draw a column, since a row would not fit a terminal
    rows = _labels(names[-2], height) if len(names) > 1 else _labels(names[-1], height) if width == 1 else []
    columns = [] if len(names) == 1 and width == 1 else _labels(names[-1], width)
    places = list(itertools.product(*(range(size) for size in outer)))
    lines: list[str] = []
    for number in kept(len(places), _MAX_GRIDS):
        if number is None:
            lines.append(style.ellipsis)
            continue
        if outer:
            lines.append(", ".join(f"{name} {index}" for name, index in zip(names, places[number], strict=False)))
        first = number * height * width
        cells = [devices[first + row * width :][:width] for row in range(height)]
        lines += grid(cells, rows, columns, style)
    return lines


def _inputs(mesh: Mapping[str, Any], devices: Sequence[str], style: LineStyle) -> list[str]:
    axes: Axes = [*mesh["inputs"], None] if len(mesh["inputs"]) == 1 else mesh["inputs"]
    if not any(axes):
        return ["inputs: every device has the whole batch"]
    drawn = _drawn_dimensions(axes)
    places = itertools.product(*(range(size) for size in mesh["shape"]))
    at = [dict(zip(mesh["axes"], place, strict=True)) for place in places]
    parts = [tuple(place[str(axes[dimension])] for dimension in drawn) for place in at]
    caption = f"inputs {_layout_text(mesh['inputs'])}{_note_on_dimensions(axes, drawn)}"
    return [caption, *_picture(axes, drawn, parts, devices, style)]


def variable_pictures(variables: Sequence[Mapping[str, Any]], style: LineStyle) -> list[str]:
    """Return one picture for each group of variables that are split alike, and a line for the unsplit variables."""
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for variable in variables:
        if any(variable["layout"]):
            groups.setdefault((tuple(variable["layout"]), _parts(variable)), []).append(variable)
    lines: list[str] = []
    for group in groups.values():
        axes, drawn = group[0]["layout"], _drawn_dimensions(group[0]["layout"])
        devices = [str(part["task"]).removeprefix("device:") for part in group[0]["parts"]]
        lines.append(f"{_layout_text(axes)}: {_list_names(group)}{_note_on_dimensions(axes, drawn)}")
        lines += [*_picture(axes, drawn, _parts(group[0]), devices, style), ""]
    unsplit = [variable for variable in variables if not any(variable["layout"])]
    return [*lines, f"whole on all devices: {_list_names(unsplit)}"] if unsplit else lines[:-1]


def _layout_text(axes: Axes) -> str:
    """Return the layout as `[~, model]`."""
    return f"[{', '.join(axis or '~' for axis in axes)}]"


def _parts(variable: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return, for each device, the index of its shard along each drawn dimension."""
    drawn = _drawn_dimensions(variable["layout"])
    bounds = [part["bounds"] for part in variable["parts"]]
    firsts = [sorted({each[dimension][0] for each in bounds}) for dimension in drawn]
    return tuple(
        tuple(starts.index(each[dimension][0]) for dimension, starts in zip(drawn, firsts, strict=True))
        for each in bounds
    )


def _drawn_dimensions(axes: Axes) -> list[int]:
    """Return the first two dimensions that are split."""
    return [dimension for dimension, axis in enumerate(axes) if axis][:2]


def _note_on_dimensions(axes: Axes, drawn: Sequence[int]) -> str:
    """Return a note about the drawn dimensions, or an empty string if there are at most two dimensions."""
    if len(axes) <= 2:
        return ""
    return f" (drawn: dimension{'s' if len(drawn) > 1 else ''} {' and '.join(map(str, drawn))} of {len(axes)})"


def _picture(
    axes: Axes, drawn: Sequence[int], parts: Sequence[tuple[int, ...]], devices: Sequence[str], style: LineStyle
) -> list[str]:
    """Return a grid whose cells list the devices that hold a shard. The first of two dimensions goes downwards."""
    downwards = len(drawn) == 2 or (drawn[0] == 0 and len(axes) == 2)
    held: dict[_Cell, list[str]] = {}
    for device, part in zip(devices, parts, strict=True):
        cell = (part[0], part[1]) if len(part) == 2 else (part[0], 0) if downwards else (0, part[0])
        held.setdefault(cell, []).append(device)
    height, width = (max(cell[side] for cell in held) + 1 for side in (0, 1))
    rows = _labels(axes[drawn[0]], height) if downwards else []
    columns = _labels(axes[drawn[-1]], width) if len(drawn) == 2 or not downwards else []
    most = _DEVICES_IN_WIDE_CELL if width <= _MAX_WIDE_COLUMNS else _DEVICES_IN_NARROW_CELL
    cells = [
        [_list_devices(held.get((row, column), []), most, style) for column in range(width)] for row in range(height)
    ]
    return grid(cells, rows, columns, style)


def _list_devices(devices: Sequence[str], most: int, style: LineStyle) -> str:
    return " ".join(style.ellipsis if number is None else devices[number] for number in kept(len(devices), most))


def _labels(axis: object, size: int) -> list[str]:
    return [f"{axis} {index}" for index in range(size)]


def _list_names(variables: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of weights, and the number of optimizer variables, which are placed like their weights."""
    names = [str(variable["name"]) for variable in variables if not _belongs_to_optimizer(variable)]
    parts = names if len(names) <= _MAX_NAMES else [*names[:_MAX_NAMES], f"{len(names) - _MAX_NAMES:,} more"]
    slots = len(variables) - len(names)
    return ", ".join([*parts, *([count(slots, "optimizer variable")] if slots else [])])


def _belongs_to_optimizer(variable: Mapping[str, Any]) -> bool:
    """Return True if the name of the variable shows that it belongs to an optimizer."""
    return str(variable["name"]).startswith("optimizer")
