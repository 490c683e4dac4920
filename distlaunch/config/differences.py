"""What differs between two configs, in the words of the config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from distlaunch.base import strict_json

OF_THE_MODEL = ("model.", "compile.", "precision", "data.preprocessing", "strategy.kind", "strategy.partitioner")
"""Keys that decide which variables there are, by how they begin."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...] = ("",)) -> list[str]:
    """Lines such as `model.args.units: 64 -> 128`.

    Args:
        before, now: configs as plain data, or as JSON holds it.
        keys: how the keys that are compared begin.
    """
    return [line for key, line in changes(before, now) if ".".join(key).startswith(keys)]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """The keys that differ, each with such a line."""
    old, new = dict(_flat(_as_json(before))), dict(_flat(_as_json(now)))
    changed = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    # `args: {}` -> `args.units: 64` is one change and not two
    shown = [key for key in changed if not (_filled(key, old, new) or _filled(key, new, old))]
    return [(key, f"{'.'.join(key)}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}") for key in shown]


def _filled(key: tuple[str, ...], one: Mapping[tuple[str, ...], str], other: Mapping[tuple[str, ...], str]) -> bool:
    """Whether a mapping is empty here and not there: its entries show that."""
    return one.get(key) == "{}" and any(each[: len(key)] == key for each in other if len(each) > len(key))


def _as_json(config: Mapping[str, Any]) -> Any:
    return json.loads(strict_json.dumps(config))


def _flat(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, (*key, name))
    else:
        yield key, json.dumps(value, ensure_ascii=False)
