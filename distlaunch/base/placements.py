"""Checks the record of which task holds which variable, before anything is drawn of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.base.plain_types import fits

_MOST_DEVICES = 1_000_000
_VARIABLE: dict[str, Any] = {"name": str, "shape": list[int], "parts": list[dict[str, Any]]}
_PART: dict[str, Any] = {"task": str, "bytes": int}
_MESH: dict[str, Any] = {"axes": list[str], "shape": list[int], "devices": list[int | str], "inputs": list[str | None]}


def check_placement(variables: Sequence[Mapping[str, Any]], mesh: Mapping[str, Any] | None) -> None:
    """Raise ValueError if data is not what the event VariablesPlaced has."""
    if mesh is not None:
        _require(mesh, _MESH)
        sizes = mesh["shape"]
        if not sizes or len(sizes) != len(mesh["axes"]) or not all(1 <= size <= _MOST_DEVICES for size in sizes):
            raise ValueError("the mesh has no sizes")
        if math.prod(sizes) != len(mesh["devices"]) or not {*mesh["inputs"]} <= {*mesh["axes"], None}:
            raise ValueError("the mesh has other devices, or its inputs other axes")
    for variable in variables:
        _require(variable, _VARIABLE)
        for part in variable["parts"]:
            _require(part, _PART)
            if "layout" in variable:
                _require(part, {"bounds": list[list[int]]})
                if [len(pair) for pair in part["bounds"]] != [2] * len(variable["shape"]):
                    raise ValueError("bounds are not those of the shape")
            elif not fits(part.get("rows", 0), list[int] | None) or len(part["rows"] or (0, 0)) != 2:
                raise ValueError("rows are no pair")
        if "layout" in variable:
            layout = variable["layout"]
            if not fits(layout, list[str | None]) or len(layout) != len(variable["shape"]) or not variable["parts"]:
                raise ValueError("the layout is not that of the shape")


def _require(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        value = data.get(name)
        if not fits(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} has another type")
