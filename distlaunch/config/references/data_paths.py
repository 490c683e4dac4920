"""Which values of a config are paths of data, as far as that can be seen without calling the data function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.config.read.tree import Key
from distlaunch.config.run import RunConfig


def data_paths(config: RunConfig) -> dict[str, str]:
    """Keys within `data.args` -> texts with a slash that are no URL, whether or not there is such a file."""
    return {
        Problem(key, "").dotted: text
        for key, text in _texts(config.data.args, ("data", "args"))
        if "/" in text and "://" not in text and "\n" not in text
    }


def _texts(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, (*key, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*key, number))
