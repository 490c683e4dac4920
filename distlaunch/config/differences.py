"""Differences between two configs, in the form of config keys."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distlaunch.base import strict_json
from distlaunch.base.plain_types import is_dict, is_list

OF_THE_MODEL = ("model.", "compile.", "precision", "data.preprocessing", "strategy.kind", "strategy.partitioner")
"""Beginnings of the keys that determine which variables a model has."""

OF_THE_WEIGHTS = ("model.", "precision", "data.preprocessing")
"""Beginnings of the keys that determine what a model computes with given weights."""

OF_THE_ORDER = ("seed", "data.global_batch", "data.remainder", "data.shuffle", "data.streams", "data.train_examples")
"""Beginnings of the keys that determine which training examples follow in which order."""

IsSame = Callable[[str, str], bool]
"""Returns whether two strings of a config, before and now, mean the same."""


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...] = ("",), is_same: IsSame = operator.eq
) -> list[str]:
    """Return lines such as `model.args.units: 64 -> 128`.

    Args:
        before: a config as plain data, or as read from JSON.
        now: the config to compare with.
        keys: beginnings of the keys to compare.
    """
    return [line for key, line in changes(before, now, is_same) if ".".join(key).startswith(keys)]


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any], is_same: IsSame = operator.eq
) -> list[tuple[tuple[str, ...], str]]:
    """Return the keys that differ, each with a line as in `differences`."""
    old, new = dict(flat(before)), dict(flat(now))
    changed = [key for key in {**new, **old} if not _are_same(old.get(key), new.get(key), is_same)]
    # `args: {}` -> `args.units: 64` is one change, not two
    shown = [key for key in changed if not (_filled(key, old, new) or _filled(key, new, old))]
    return [(key, f"{'.'.join(key)}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}") for key in shown]


def _are_same(old: str | None, new: str | None, is_same: IsSame) -> bool:
    """Return whether two JSON values are the same, or differ only in texts that `is_same` accepts."""
    if old == new or old is None or new is None:
        return old == new
    before, now = json.loads(old), json.loads(new)
    if is_list(before) and is_list(now) and len(before) == len(now):
        pairs = zip(before, now, strict=True)
        return all(_are_same(json.dumps(each), json.dumps(other), is_same) for each, other in pairs)
    if is_dict(before) and is_dict(now) and before.keys() == now.keys():
        return all(_are_same(json.dumps(before[key]), json.dumps(now[key]), is_same) for key in before)
    return isinstance(before, str) and isinstance(now, str) and is_same(before, now)


def _filled(key: tuple[str, ...], one: Mapping[tuple[str, ...], str], other: Mapping[tuple[str, ...], str]) -> bool:
    """Return whether a mapping is empty in one config and not in the other, so that its entries show the difference."""
    return one.get(key) == "{}" and any(each[: len(key)] == key for each in other if len(each) > len(key))


def flat(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each key of a config with its value as JSON. Lists and empty mappings are values.

    Args:
        config: plain data, or a config as read from JSON.
    """
    return _flat(json.loads(strict_json.dumps(config)))


def _flat(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if is_dict(value) and value:
        for name, inner in value.items():
            yield from _flat(inner, (*key, name))
    else:
        yield key, json.dumps(value, ensure_ascii=False)
