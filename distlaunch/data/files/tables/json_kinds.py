"""Determines the types of the fields of JSON records from all values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

from distlaunch.data.files.tables.base import Kind

# names with a space are reasons why a column cannot be a tensor; see `Kind`
_OBJECTS = Kind("has objects")
_RAGGED = Kind("has lists of different lengths")
_MIXED = Kind("has values of different types")
_LARGE = Kind("has numbers of more than 64 bits")
_NO_BOOL = "has true and false, and is missing in some records"
_NULL = Kind("null", missing=True)
_NAMES = {bool: "bool", int: "int64", float: "float32", str: "string"}
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Fields:
    """Kinds of the fields of the records so far."""

    def __init__(self) -> None:
        self.by_name: dict[str, Kind] = {}
        self.num_records = 0

    def add(self, records: list[dict[str, Any]]) -> None:
        """Update the kinds with more records."""
        found = Fields()
        found.num_records = len(records)
        for name in dict.fromkeys(itertools.chain.from_iterable(records)):
            found.by_name[name] = _kind_of_all([record.get(name) for record in records])
        self.merge(found)

    def merge(self, other: Fields) -> None:
        """Merge with the kinds of other records."""
        if not other.num_records:
            return
        for name in dict.fromkeys([*self.by_name, *other.by_name]):
            here = self.by_name.get(name, _NULL if self.num_records else None)
            there = other.by_name.get(name, _NULL)
            self.by_name[name] = there if here is None else _join(here, there)
        self.num_records += other.num_records

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds for reading; integers with missing values become float32, with NaN."""
        return {name: _readable(kind) for name, kind in self.by_name.items()}


def _readable(kind: Kind) -> Kind:
    if kind.missing and kind.name in ("int64", "null"):
        return Kind("float32", kind.shape, missing=True)
    if kind.name == "null":
        return Kind("has only empty lists")
    if kind.missing and kind.name == "bool":
        return Kind(_NO_BOOL, kind.shape, missing=True)
    return kind


def _kind_of_all(values: Iterable[Any]) -> Kind:
    values = list(values)
    types = set(map(type, values))
    if types <= {int} and types:  # this and the next test handle common cases fast
        return Kind("int64") if min(values) >= _LOWEST and max(values) <= _HIGHEST else _LARGE
    if len(types) == 1 and types <= _NAMES.keys():
        return Kind(_NAMES[types.pop()])
    return functools.reduce(_join, map(_kind_of, values))


def _kind_of(value: Any) -> Kind:
    if value is None:
        return _NULL
    if isinstance(value, dict):
        return _OBJECTS
    if isinstance(value, list):
        if not value:
            return Kind("null", (0,))
        inner = _kind_of_all(value)
        return Kind(inner.name, (len(value), *inner.shape), inner.missing)
    # `type` and not `isinstance`, because True is an int
    if type(value) is int and not _LOWEST <= value <= _HIGHEST:
        return _LARGE
    return Kind(_NAMES[type(value)])


def _join(a: Kind, b: Kind) -> Kind:
    """Return the narrowest kind that fits the values of both."""
    missing = a.missing or b.missing
    for kind, other in ((a, b), (b, a)):
        if kind == _NULL:
            return Kind(other.name, other.shape, missing)
        if " " in kind.name:  # a reason, see `Kind`
            return Kind(kind.name, kind.shape, missing)
    if a.shape != b.shape:
        return _RAGGED if a.shape and b.shape else _MIXED
    names = {a.name, b.name} - {"null"}
    if len(names) <= 1:
        return Kind(names.pop() if names else "null", a.shape, missing)
    return Kind("float32", a.shape, missing) if names == {"int64", "float32"} else _MIXED
