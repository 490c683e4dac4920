"""Every event is the same after it was written and read, whatever it holds."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.event_files import EventWriter, read_events
from distlaunch.base.events import Event, Logs, VariablesPlaced
from distlaunch.base.protocol import EVENT_FORMAT
from tests.properties.drawn import texts

_whole = st.integers(1 - 2**63, 2**63 - 1)  # numbers beyond that are damage
_finite = st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | _whole | _finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
_part = st.fixed_dictionaries({"task": texts, "bytes": _whole, "rows": st.none() | st.just([0, 3])})
_variable = st.fixed_dictionaries(
    {"name": texts, "shape": st.lists(_whole, max_size=2), "dtype": texts, "parts": st.lists(_part, max_size=2)}
)
_MESH = {"axes": ["batch", "model"], "shape": [1, 2], "devices": [0, "b"], "inputs": ["batch", None]}
_STAMPED = {field.name for field in dataclasses.fields(Event)}


def of_kind(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(kind)
    if kind is VariablesPlaced:  # the records in it are typed, too
        return st.builds(kind, variables=st.lists(_variable, max_size=3), mesh=st.none() | st.just(_MESH))
    names = [field.name for field in dataclasses.fields(kind) if field.name not in _STAMPED]
    return st.builds(kind, **{name: _of(hints[name]) for name in names})


def _of(hint: Any) -> st.SearchStrategy[Any]:
    if hint == Logs:
        return st.dictionaries(texts, st.floats(), max_size=3)
    if hint == list[dict[str, Any]]:
        return st.lists(st.dictionaries(texts, _json, max_size=3), max_size=3)
    if hint == dict[str, Any] | None:
        return st.none() | st.dictionaries(texts, _json, max_size=3)
    parts = [_of(part) for part in typing.get_args(hint)]
    if isinstance(hint, types.UnionType):
        return st.one_of(parts)
    if typing.get_origin(hint) is list:
        return st.lists(*parts, max_size=3)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(*parts, max_size=3)
    return {str: texts, float: _finite, int: _whole}.get(hint, st.from_type(hint))


events = st.sampled_from(sorted(Event.kinds.items())).flatmap(lambda named: of_kind(named[1]))


@given(st.lists(events, max_size=6), st.integers(0, 99), texts)
def test_events_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, told: list[Event], attempt: int, task: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "events.jsonl"
    path.unlink(missing_ok=True)
    writer = EventWriter(path, attempt=attempt, task=task)
    written = [writer.write(event) for event in told]
    writer.close()
    assert repr(read_events(path)) == repr(written)
    for line, event in zip(path.read_text().splitlines(), told, strict=True):
        plain = json.loads(line, parse_constant=pytest.fail)
        assert plain["event"] == type(event).__name__
        assert (plain["attempt"], plain["task"], plain["format_version"]) == (attempt, task, EVENT_FORMAT)
