"""Checks the types of plain data from JSON. Agents do not import pydantic, so that they start fast."""

from __future__ import annotations

import types
import typing
from typing import Any, TypeGuard

_LARGEST = 2**63


def is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Return True for a dict. Type checkers then treat its keys and values as Any."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return True for a list; see `is_dict`."""
    return isinstance(value, list)


def is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Return True for a tuple; see `is_dict`."""
    return isinstance(value, tuple)


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of a type, such as `dict[str, list[int]]`."""
    # most values of events have these types, and a long run has millions of values: `get_origin` would take longer
    if kind is int or kind is float:
        # in Python, True is an int, and ints are unlimited
        if isinstance(value, int):
            return not isinstance(value, bool) and abs(value) < _LARGEST
        return kind is float and isinstance(value, float)
    if kind is str or kind is bool:
        return isinstance(value, kind)
    if kind is Any:
        return True
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, tuple):
        return (is_list(value) or is_tuple(value)) and all(fits(each, arguments[0]) for each in value)
    if origin is dict:
        return is_dict(value) and all(fits(each, arguments[1]) for each in value.values())
    return value is None if kind in (None, type(None)) else isinstance(value, kind)
