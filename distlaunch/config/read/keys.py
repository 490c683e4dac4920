"""Finds keys of the config by their last word, for users who try that word as an option."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Union, get_args, get_origin

from distlaunch.config.base import Section
from distlaunch.config.run import RunConfig

_USUAL = {
    "batch_size": "data.global_batch",
    "learning_rate": "compile.optimizer.args.learning_rate",
    "lr": "compile.optimizer.args.learning_rate",
    "strategy": "strategy.kind",
    "engine": "engine.kind",
}
"""Names that other programs use for these keys."""


def settings_in(text: str) -> list[str]:
    """Return the options that a text such as `epochs=3` may have been meant as; empty if it has no key."""
    key, equals, value = text.partition("=")
    if not equals:
        return []
    first, dot, _ = key.partition(".")
    keys = [key] if first in RunConfig.model_fields and (dot or key not in _USUAL) else keys_called(key)
    return [f"--set {each}={value}" for each in keys]


def keys_called(word: str) -> list[str]:
    """Return the full keys with this name, such as `train.epochs` for `epochs`; singular and plural count as equal."""
    name = word.replace("-", "_")
    if name in _USUAL:
        return [_USUAL[name]]
    names = {name, f"{name}s", name.removesuffix("s")}
    return [key for key in _keys(RunConfig) if key.rpartition(".")[2] in names]


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        parts = [part for part in _alternatives(field.annotation) if part is not type(None)]
        inner = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
        if len(inner) == len(parts) == 1:
            yield from _keys(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _alternatives(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation
