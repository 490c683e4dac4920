"""Converts pydantic's errors to one problem per key, with the received value, the allowed values and a hint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from distlaunch.base.errors import Problem
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config import engines, strategies
from distlaunch.config.base import Section
from distlaunch.config.read import expected
from distlaunch.config.read.expected import Expected, inside
from distlaunch.config.read.tree import Key, Node
from distlaunch.config.read.words import closest, did_you_mean, listed, received, show
from distlaunch.config.run import RunConfig

_BOOLEAN_WORDS = {"yes", "no", "on", "off", "y", "n", "true", "false"}
_EXAMPLES = {"strategy": "mirrored", "engine": "local"}
_UNKNOWN = "unknown key"
_MISSING = "missing"
_MAX_PROBLEMS = 200


def problems_of(error: ValidationError, data: dict[str, Any], root: Node | None = None) -> list[Problem]:
    """Return one problem for each wrong key.

    Args:
        error: the error of validating `data`.
        data: the config as plain values.
        root: the config as it was written; None if unknown.
    """
    found: dict[Key, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        if len(found) > _MAX_PROBLEMS:  # searching for similar names takes time for each problem
            break
        problem = _problem(detail["type"], detail["loc"], data, root)
        if problem is not None:
            # pydantic reports an error for each member of a union; keep only the first
            found.setdefault(problem.key, problem)
    for misspelt in [key for key, problem in found.items() if problem.message.startswith(_UNKNOWN)]:
        # `nam:` explains why `name:` is missing
        close = closest(str(misspelt[-1]), _allowed(misspelt[:-1], data))
        # so does `adam: {...}`
        as_name = "; write {name:" in found[misspelt].message
        meant = (*misspelt[:-1], "name" if as_name else close or "")
        if meant in found and found[meant].message.startswith(_MISSING):
            del found[meant]
    # a value of the wrong type hides what is inside it
    problems = [problem for key, problem in found.items() if not any(key[:depth] in found for depth in range(len(key)))]
    if (number := error.error_count()) > len(found) > _MAX_PROBLEMS:
        problems.append(Problem((), f"{number:,} values are wrong or unknown; only the first ones are listed"))
    return problems


def _problem(kind: str, location: Key, data: dict[str, Any], root: Node | None) -> Problem | None:
    key = _key(location, data)
    if key is None:
        return None
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        name = str(location[0])
        section = data[name]
        return _kind_problem(name, section) if is_dict(section) else _wrong_type((name,), data, root)
    if location and location[-1] == "[key]":
        return Problem(key, _key_type(key))
    if kind == "missing":
        return Problem(key, _missing(key, data))
    if kind in ("extra_forbidden", "invalid_key"):
        return Problem(key, unknown_key(key, data))
    return _wrong_type(key, data, root)


def _key(location: Key, data: Any) -> Key | None:
    """Return the location without the names of union members.

    Return None to ignore the error of a member that was not meant, if another member fits the type of the value.
    """
    key: list[str | int] = []
    expect: Expected | None = Expected(RunConfig)
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if part == "[key]":
            break
        # the tag of the union, which pydantic puts into the location
        if position == 1 and part in _kinds(location[0]):
            continue
        if _is_member(part, data, expect, last=last):
            if not _is_meant(str(part), data, expect):
                return None if _accepts_kind(expect, data) else tuple(key)
            continue
        key.append(part)
        expect = expect.inner(part, data) if expect else None
        data = inside(data, part)
    return tuple(key)


def _is_member(part: str | int, data: Any, expect: Expected | None, *, last: bool) -> bool:
    """Return True if a part of a location is the name of a union member instead of a key."""
    if isinstance(part, int) or expect is None or len(expect.alternatives()) < 2:
        return False
    # names that pydantic gives to union members other than models
    if not is_dict(data) or any(part.startswith(word) for word in ("list[", "dict[", "literal[", "constrained-")):
        return True
    return part not in data and not (last and expect.section(data) is not None and part in _fields(expect, data))


def _fields(expect: Expected, data: Any) -> Any:
    section = expect.section(data)
    return section.model_fields if section is not None else {}


def _accepts_kind(expect: Expected | None, data: Any) -> bool:
    """Return True if one of the members has the value's type; only the mistakes in that member are then reported."""
    if expect is None or not (is_dict(data) or is_list(data)):
        return False
    return expect.accepts(type(data)) or (is_dict(data) and expect.section(None) is not None)


def _is_meant(member: str, data: Any, expect: Expected | None) -> bool:
    """Return True if a list or mapping was meant to be this member of a union."""
    if is_list(data):
        return member.startswith("list[")
    if not is_dict(data) or expect is None:
        return False
    if expect.section(data) is None:
        return member.startswith("dict[")
    return not member.startswith(("dict[", "list[", "str", "int", "float", "bool", "literal", "constrained"))


def _kinds(section: str | int) -> Mapping[str, type[Section]]:
    """Return the classes of a section by kind; empty for a section without kinds."""
    if section == "engine":
        return engines.installed().models
    return strategies.MODELS if section == "strategy" else {}


def _kind_problem(name: str, section: dict[str, Any]) -> Problem:
    kinds = list(_kinds(name))
    if "kind" not in section:
        example = _EXAMPLES[name]
        return Problem((name,), f"missing 'kind'; expected one of {listed(kinds)}; write `kind: {example}` below it")
    kind = section["kind"]
    if name == "engine" and isinstance(kind, str) and kind in engines.installed().unusable:
        return Problem((name, "kind"), f"got {show(kind)}: {engines.installed().unusable[kind]}")
    hint = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
    return Problem((name, "kind"), f"got {show(kind)}; expected one of {listed(kinds)}{hint}")


def _missing(key: Key, data: dict[str, Any]) -> str:
    expect = expected.at(key, data)
    words = f"; expected {expect.describe()}" if expect else ""
    parent = Problem(key[:-1], "").dotted
    place = f"below `{parent}:`" if parent else "at the top of the file"
    return f"{_MISSING}{words}; add `{key[-1]}:` {place}"


def unknown_key(key: Key, data: dict[str, Any]) -> str:
    """Return the message for a key that its section does not have."""
    name = str(key[-1])
    if key == ("engine", "slurm"):
        return f"{_UNKNOWN}; write the keys of Slurm beside `kind: slurm`, as in `engine: {{kind: slurm, nodes: 2}}`"
    allowed = _allowed(key[:-1], data)
    if not allowed:
        return f"{_UNKNOWN}; remove it"
    hint = did_you_mean(name, allowed) or _as_component(key, allowed, data)
    if not hint:
        home = _homes().get(name) or _homes().get(closest(name, _homes(), cutoff=0.85) or "")
        dotted = ".".join(map(str, key))  # the key may belong to another kind of the same section
        place = "" if home and "." in home else " at the top of the file"
        meant = f"; did you mean {home}{place}?" if home and home != dotted else ""
        hint = meant or _of_other_kinds(key) or _as_argument(key, allowed, data) or "; remove it"
    return f"{_UNKNOWN}{hint} (allowed: {', '.join(allowed)})"


def _as_component(key: Key, allowed: list[str], data: dict[str, Any]) -> str:
    """Return how to write a Keras object such as `{adam: {...}}` or `{name: adam, learning_rate: 0.1}`."""
    section = _value_at(key[:-1], data)
    if not {"name", "args"} <= set(allowed) or not is_dict(section):
        return ""
    if "name" in section:
        return _as_argument(key, allowed, data)
    args = section[key[-1]]
    if isinstance(args, str) and key[-1] in ("class", "class_name", "type", "kind", "id"):
        return f"; write {{name: {args}}}"
    if args is not None and not is_dict(args):
        return ""
    return f"; write {{name: {key[-1]}{f', args: {_flow(args)}' if args else ''}}}"


def _as_argument(key: Key, allowed: list[str], data: dict[str, Any]) -> str:
    """Return how to write an argument that stands beside `args` instead of in it."""
    section = _value_at(key[:-1], data)
    if "args" not in allowed or not is_dict(section) or not {"name", "function"} & section.keys():
        return ""
    whose = section.get("name") or section.get("function")
    return f"; if it is an argument of {whose}, write `args: {_flow({key[-1]: section[key[-1]]})}`"


def _flow(values: dict[Any, Any]) -> str:
    """Return a mapping as YAML in one line, without the contents of lists and mappings."""

    def shown(value: Any) -> str:
        return "{...}" if is_dict(value) else "[...]" if is_list(value) else "null" if value is None else show(value)

    return f"{{{', '.join(f'{name}: {shown(value)}' for name, value in values.items())}}}"


def _value_at(key: Key, data: Any) -> Any:
    for part in key:
        data = inside(data, part)
    return data


def _of_other_kinds(key: Key) -> str:
    """Return a hint with the kinds that have a key, if this kind of strategy or engine does not have it."""
    models: Mapping[str, type[Section]] = _kinds(key[0]) if len(key) == 2 else {}
    kinds = [kind for kind, model in models.items() if key[-1] in model.model_fields]
    return f"; it belongs to {' or '.join(f'`kind: {kind}`' for kind in kinds)}" if kinds else ""


def _allowed(key: Key, data: dict[str, Any]) -> list[str]:
    """Return the keys of the section at a key."""
    expect = expected.at(key, data)
    value = _value_at(key, data)
    section = expect.section(value) if expect else None
    return list(section.model_fields) if section else []


@functools.cache
def _homes() -> dict[str, str]:
    """Return the full key for the last word of each key, for keys in the wrong section: epochs -> train.epochs."""
    homes: dict[str, str] = {}
    for section, info in RunConfig.model_fields.items():
        homes.setdefault(section, section)
        for alternative in expected.of_field(info).alternatives():
            if isinstance(alternative.type, type) and issubclass(alternative.type, BaseModel):
                for name in alternative.type.model_fields:
                    if name not in ("args", "name"):
                        homes.setdefault(name, f"{section}.{name}")
    return homes


def _key_type(key: Key) -> str:
    expect = "the whole number of a class, as in `3: 2.0`" if "class_weight" in key else "text; put the key in quotes"
    return f"got the key {key[-1]!r}; expected {expect}"


def _wrong_type(key: Key, data: dict[str, Any], root: Node | None) -> Problem:
    value, expect = _value_at(key, data), expected.at(key, data)
    if expect is None:
        return Problem(key, f"{received(value)}, which does not fit here; see `distlaunch schema`")
    shown = f"got {show(value)}" if _type_fits(value, expect) else received(value)
    return Problem(key, f"{shown}; expected {expect.describe()}{_hint(value, expect, root and root.at(key))}")


def _type_fits(value: Any, expect: Expected) -> bool:
    """Return True if only the value is wrong, so that the message need not name the type."""
    return expect.accepts(type(value)) or (isinstance(value, str) and bool(expect.choices()))


def _hint(value: Any, expect: Expected, node: Node | None) -> str:
    """Return a hint about what to write instead, if that can be guessed."""
    is_section = expect.section(None) is not None
    if value is None:
        return f"; {'indent its keys below it' if is_section else 'write a value'}, or remove the line"
    if value is False and expect.accepts(type(None)):
        return "; write null for none"
    accepts_int, accepts_float, accepts_list = expect.accepts(int), expect.accepts(float), expect.accepts(list)
    if isinstance(value, str) and "\n" in value:
        return ""
    if isinstance(value, str):
        return _hint_for_text(value, expect, accepts_number=accepts_int or accepts_float)
    if isinstance(value, float) and accepts_int and value == value // 1:
        return f"; write {int(value)}"
    if isinstance(value, bool | int | float) and expect.accepts(str):
        if node is not None and node.text != node.filled:
            return f'; put the variable in quotes if it is text: "{node.text}"'
        return f"; put it in quotes if it is text: '{str(value).lower() if isinstance(value, bool) else value}'"
    if is_dict(value) and accepts_list:
        return "; begin each item with '- '"
    if is_list(value) and not accepts_list:
        return "; remove the '-'" if is_section or expect.accepts(dict) else "; remove the brackets or the '-'"
    return ""


def _hint_for_text(value: str, expect: Expected, *, accepts_number: bool) -> str:
    if expect.accepts(bool) and value.lower() in _BOOLEAN_WORDS:
        return "; write true or false, without quotes"
    if accepts_number and value.replace("_", "").lstrip("+-").isdigit():
        return f"; write {value.replace('_', '')}, without {'underscores' if '_' in value else 'quotes'}"
    if hint := did_you_mean(value, expect.choices()):
        return hint
    section = expect.section(None)
    key, colon, rest = value.partition(":")
    if section is not None and colon and key in section.model_fields:
        return f"; write a space after the colon: `{key}: {rest}`"
    if section is not None and "name" in section.model_fields:
        return f"; write {{name: {value}}}"
    return _hint_for_item(value, expect)


def _hint_for_item(value: str, expect: Expected) -> str:
    """Return the hint for a list that was written as its single item."""
    items = [
        args[0] for part in expect.alternatives() if get_origin(part.type) is list and (args := get_args(part.type))
    ]
    if not items:
        return ""
    if isinstance(items[0], type) and issubclass(items[0], BaseModel):
        return f"; write [{{name: {value}}}]"
    return f"; write [{closest(value, Expected(items[0]).choices()) or value}]"
