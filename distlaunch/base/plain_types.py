"""Checks the types of plain data that JSON has given; by hand, since agents do without pydantic."""

from __future__ import annotations

import types
import typing
from typing import Any

_LARGEST = 2**63


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of a type, such as `dict[str, list[int]]`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    # in Python a truth value is a number, and numbers have no end
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < _LARGEST
    if kind is float:
        return isinstance(value, float)
    return value is None if kind in (None, type(None)) else isinstance(value, kind)
