"""Makes the JSON Schema of the lines of `events.jsonl`, which `train --json` also prints, from the event classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from pydantic import TypeAdapter

from distlaunch.base.events import Event
from distlaunch.base.plain_types import is_dict, is_list

_NOT_FINITE = ["nan", "inf", "-inf"]


def events_schema() -> dict[str, Any]:
    """Return the schema of a line: one of the events, each with all its fields.

    The classes of `base/events.py` define the events. Later versions may add events and fields.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An event of a distlaunch run: a line of events.jsonl, or of `train --json`",
        "oneOf": [_schema_of(name, cls) for name, cls in sorted(Event.kinds.items())],
    }


def describe_fields(cls: type[Event]) -> dict[str, str]:
    """Return the descriptions of an event's fields by name, without fields that have none."""
    parts = inspect.getdoc(cls) or ""
    described: dict[str, str] = {}
    for base in (Event, cls):
        _, _, attributes = (inspect.getdoc(base) or "").partition("Attributes:\n")
        for found in re.finditer(r"^    ([\w, ]+): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
            text = " ".join(found.group(2).split())
            described.update(dict.fromkeys(found.group(1).split(", "), text))
    # fields that are described by a string below them
    source = textwrap.dedent(inspect.getsource(cls)).replace(parts, "")
    for found in re.finditer(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL):
        described[found.group(1)] = " ".join(found.group(2).split())
    return described


def _schema_of(name: str, cls: type[Event]) -> dict[str, Any]:
    plain = TypeAdapter(cls).json_schema()
    described = describe_fields(cls)
    fields = {
        field.name: {
            **_with_infinities(plain["properties"][field.name]),
            **({"description": described[field.name]} if field.name in described else {}),
        }
        for field in dataclasses.fields(cls)
    }
    return {
        "title": name,
        "description": " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()),
        "type": "object",
        "properties": {"event": {"const": name}, **fields},
        "required": ["event", *fields],
    }


def _with_infinities(schema: Any) -> Any:
    """Return a schema in which a number may also be a string such as `nan`, for values that JSON does not have."""
    if is_list(schema):
        return [_with_infinities(each) for each in schema]
    if not is_dict(schema):
        return schema
    kept = {name: _with_infinities(value) for name, value in schema.items() if name not in ("title", "default")}
    if kept.get("type") == "number":
        return {"anyOf": [kept, {"enum": _NOT_FINITE}]}
    return kept
