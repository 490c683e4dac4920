"""Describes the allowed values of a config key in plain words, from the models' type annotations."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.fields import FieldInfo

from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config import engines, strategies
from distlaunch.config.base import Section, Words
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import either, listed
from distlaunch.config.run import RunConfig

_WORDS = {str: "text", float: "a number", bool: "true, false", type(None): "null"}


@dataclass(frozen=True)
class Expected:
    """The type of a key, with its limits such as `Ge(1)` and perhaps a description."""

    type: Any
    limits: tuple[Any, ...] = ()
    words: str | None = field(default=None, compare=False)

    def alternatives(self) -> list[Expected]:
        """Return the members of a union and of nested unions."""
        origin = get_origin(self.type)
        if self.type is engines.AnyEngine:
            return [Expected(model) for model in engines.installed().models.values()]
        if origin is Annotated:
            inner, *metadata = get_args(self.type)
            return Expected(inner, self.limits + _limits(metadata)).alternatives()
        if origin in (Union, types.UnionType):
            return [part for arg in get_args(self.type) for part in Expected(arg, self.limits).alternatives()]
        return [self]

    @property
    def is_text(self) -> bool:
        """Return True if only text is allowed, not a number or a bool."""
        kinds = [part.type for part in self.alternatives()]
        return str in kinds and all(kind in (str, type(None)) for kind in kinds)

    def _worded(self) -> list[Expected]:
        """Return the alternatives, but do not split types that have a description."""
        if self.words:
            return [self]
        origin = get_origin(self.type)
        if origin is Annotated:
            inner, *metadata = get_args(self.type)
            return Expected(inner, self.limits + _limits(metadata), _words(metadata))._worded()
        if origin in (Union, types.UnionType):
            return [part for arg in get_args(self.type) for part in Expected(arg, self.limits)._worded()]
        return [self]

    def describe(self) -> str:
        """Describe what is allowed, such as `a whole number of at least 1, or 'auto'`."""
        parts: list[str] = []
        for part in self._worded():
            words = part.words or _describe(part)
            if words not in parts:
                parts.append(words)
        if parts == [_WORDS[bool]]:
            return "true or false"
        others = [words for words in parts if words != "null"]
        return either(others) + (", or null" if len(others) < len(parts) else "")

    def accepts(self, kind: Any) -> bool:
        """Return True if one of the alternatives is this type, such as bool."""
        return any(part.type is kind or get_origin(part.type) is kind for part in self.alternatives())

    def choices(self) -> list[str]:
        """Return the allowed words of a key that accepts only a few."""
        return [
            str(choice)
            for part in self.alternatives()
            if get_origin(part.type) is Literal
            for choice in get_args(part.type)
        ]

    def section(self, value: Any) -> type[Section] | None:
        """Return the section among the alternatives that a mapping was probably meant to be, or None."""
        types_ = [part.type for part in self.alternatives()]
        models = [model for model in types_ if isinstance(model, type) and issubclass(model, Section)]
        if not models or not is_dict(value):
            return models[0] if models else None
        # a union of strategies or engines: the kind decides which
        for kinds, default in ((strategies.MODELS, None), (engines.installed().models, engines.DEFAULT)):
            if models[0] in kinds.values():
                kind = value.get("kind", default)
                return kinds.get(kind) if isinstance(kind, str) else None
        # a mapping of outputs to losses or metrics, not `{name: ..., args: ...}`
        if any(get_origin(part.type) is dict for part in self.alternatives()) and not {"name", "args"} & value.keys():
            return None
        return models[0]

    def inner(self, part: str | int, value: Any) -> Expected | None:
        """Return the expected value at a key or index within this one; None if there is none.

        Args:
            part: the key or index.
            value: the value in the config, which distinguishes sections from mappings.
        """
        section = self.section(value) if isinstance(part, str) else None
        if section is not None:
            info = section.model_fields.get(part) if isinstance(part, str) else None
            return of_field(info) if info else None
        container = list if isinstance(part, int) and not is_dict(value) else dict
        for alternative in self.alternatives():
            if get_origin(alternative.type) is container:
                return Expected(get_args(alternative.type)[-1])
        return None


def of_field(info: FieldInfo) -> Expected:
    return Expected(info.annotation, _limits(info.metadata), _words(info.metadata))


def at(key: Key, data: Any) -> Expected | None:
    """Return what is expected at a key of a config; None if the schema does not describe the key."""
    expected: Expected | None = Expected(RunConfig)
    for part in key:
        if expected is None:
            return None
        expected = expected.inner(part, data)
        data = inside(data, part)
    return expected


def inside(data: Any, part: str | int) -> Any:
    """Return the value at a key or index, or None."""
    if is_dict(data):
        return data.get(part)
    return data[part] if is_list(data) and isinstance(part, int) and part < len(data) else None


def _describe(part: Expected) -> str:
    origin = get_origin(part.type)
    if origin is Literal:
        choices = listed(get_args(part.type), 20)
        return f"one of {choices}" if "," in choices else choices
    if origin is list:
        return f"a list (each item {Expected(get_args(part.type)[0]).describe()})"
    if origin is dict:
        inner = get_args(part.type)[1]
        return "a mapping" if inner is Any else f"a mapping to {Expected(inner).describe()}"
    if isinstance(part.type, type) and issubclass(part.type, Section):
        return f"a section with {listed(part.type.model_fields, 6)}"
    kind: Any = cast(Any, part.type)
    return _number(part) if kind in (int, float) else _WORDS.get(kind, "a value")


def _number(part: Expected) -> str:
    words = "a whole number" if part.type is int else "a number"
    low = next((limit.ge for limit in part.limits if isinstance(limit, Ge)), None)
    high = next((limit.le for limit in part.limits if isinstance(limit, Le)), None)
    above = next((limit.gt for limit in part.limits if isinstance(limit, Gt)), None)
    if above is not None:
        return f"{words} above {above}"
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    return f"{words} of at least {low}" if low is not None else words


def _limits(metadata: list[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for entry in metadata:
        found += entry.metadata if isinstance(entry, FieldInfo) else [entry]
    return tuple(limit for limit in found if isinstance(limit, Ge | Gt | Le | MinLen))


def _words(metadata: list[Any]) -> str | None:
    """Return the description in a type's own annotation, or None."""
    return next((entry.text for entry in metadata if isinstance(entry, Words)), None)
