"""All keys of a config, as its models declare them, so that a new key is one that a test must know."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from distlaunch.config.base import Section
from distlaunch.config.engines import AnyEngine, installed


def keys_of(model: type[Section], before: str = "") -> Iterator[str]:
    """Yield `data.shuffle`, `strategy.mirrored.replicas`, `train.callbacks[].name`, and so on.

    A section that may be left out, or be something else, is a key of its own, too.
    """
    for name, field in model.model_fields.items():
        key = f"{before}{name}"
        sections, others = [], False
        for choice in _choices(field.annotation):
            section, at = _section_in(choice)
            if section is None:
                others = True
            else:
                sections.append((section, at))
        if others:
            yield key
        for section, at in sections:
            kind = _kind_of(section) if len(sections) > 1 else ""
            yield from keys_of(section, f"{key}{at}.{kind}")


def _choices(annotation: Any) -> Iterator[Any]:
    if annotation is AnyEngine:
        yield from installed().models.values()
        return
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _choices(parts[0])
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _choices(part)
    else:
        yield annotation


def _section_in(annotation: Any) -> tuple[type[Section] | None, str]:
    """Return the section that a value is, or holds in lists and mappings, and how to get there."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, ""
    if typing.get_origin(annotation) in (list, dict):
        for choice in _choices(typing.get_args(annotation)[-1]):
            section, at = _section_in(choice)
            if section is not None:
                return section, f"[]{at}"
    return None, ""


def _kind_of(section: type[Section]) -> str:
    kind = section.model_fields.get("kind")
    if kind is None or typing.get_origin(kind.annotation) is not Literal:
        return ""
    return f"{typing.get_args(kind.annotation)[0]}."
