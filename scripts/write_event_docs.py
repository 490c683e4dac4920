"""Writes docs/events.md from the classes of the events: `python scripts/write_event_docs.py > docs/events.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys

from distlaunch.base.events import Event
from distlaunch.runs.event_schema import describe_fields

HEAD = """# Events

A run records what happens as lines of JSON, one event in each line. To read the events while a run trains, start it
with `train --json`, which prints them between `CommandStarted` and `CommandEnded`. The run directory has the same
lines: the chief and the launcher write to `events.jsonl`, every other task writes to `attempts/N/TASK/events.jsonl`.

`distlaunch schema --events` prints the JSON Schema. Programs should ignore events and fields that they do not know,
because a later version may add some.

Every line has the field `event` with the name of the event, such as `EpochEnded`, and these fields:

{common}

Numbers that JSON does not have are written as the strings `"nan"`, `"inf"` and `"-inf"`. Epochs count from 0, as in
Keras's callbacks. The other fields depend on the event:

<!-- written by scripts/write_event_docs.py -->
"""


def document() -> str:
    """Return the document."""
    common = {field.name for field in dataclasses.fields(Event)}
    parts = [HEAD.format(common=_table(Event, common))]
    for name, cls in sorted(Event.kinds.items()):
        own = {field.name for field in dataclasses.fields(cls)} - common
        paragraphs = (inspect.getdoc(cls) or "").partition("Attributes:")[0].strip()
        parts.append(f"## {name}\n\n{paragraphs}\n" + (f"\n{_table(cls, own)}\n" if own else ""))
    return "\n".join(parts)


def _table(cls: type[Event], names: set[str]) -> str:
    described = describe_fields(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in names]
    rows = [f"| `{each.name}` | `{_type_of(each)}` | {_cell(described.get(each.name, ''))} |" for each in fields]
    return "\n".join(["| field | type | |", "|---|---|---|", *rows])


def _type_of(field: dataclasses.Field[object]) -> str:
    text = str(field.type).replace("Logs", "dict[str, float]")
    words = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object",
             "list": "array", "None": "null", "Any": "any"}  # fmt: skip
    return re.sub(r"\w+", lambda found: words.get(found.group(), found.group()), text).replace(" | ", " or ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(document())
