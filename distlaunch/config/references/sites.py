"""The places in a config that name functions and Keras objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distlaunch.base.errors import Problem
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config.read.tree import Key, texts_in
from distlaunch.config.run import Component, MetricComponent, OptimizerComponent, RunConfig

Role = Literal[
    "model", "data", "map", "augment", "preprocessing", "step", "optimizers", "losses", "metrics", "callbacks"
]

STAND_IN = "unknown:unknown"
"""Replacement for a missing or invalid reference, so that the rest of a config can be checked."""


@dataclass(frozen=True)
class Site:
    """A name in the config.

    Attributes:
        args: the arguments in the config; None if distlaunch passes its own.
        additive: the `additive` of a metric.
    """

    key: Key
    name: str
    role: Role
    args: dict[str, Any] | None = None
    args_key: Key = ()
    additive: bool | None = None

    @property
    def is_reference(self) -> bool:
        """True if the name is a `module:function`, not a name of Keras."""
        return ":" in self.name and self.name != STAND_IN


def sites(config: RunConfig) -> Iterator[Site]:
    """Yield the names of all functions, classes and Keras objects in a config."""
    yield Site(("model", "function"), config.model.function, "model", config.model.args, ("model", "args"))
    if config.data.function is not None:
        yield Site(("data", "function"), config.data.function, "data", config.data.args, ("data", "args"))
    if config.data.map is not None:
        yield Site(("data", "map"), config.data.map, "map")
    if config.data.augment is not None:
        yield Site(("data", "augment"), config.data.augment, "augment")
    if (before := config.data.preprocessing) is not None:
        key = ("data", "preprocessing")
        yield Site((*key, "function"), before.function, "preprocessing", before.args, (*key, "args"))
    if config.train.step is not None:
        yield Site(("train", "step"), config.train.step, "step")
    if config.compile is not None:
        yield from _named(config.compile.optimizer, ("compile", "optimizer"), "optimizers")
        yield from _named(config.compile.loss, ("compile", "loss"), "losses")
        yield from _named(config.compile.metrics, ("compile", "metrics"), "metrics")
        yield from _named(config.compile.weighted_metrics, ("compile", "weighted_metrics"), "metrics")
    for index, callback in enumerate(config.train.callbacks):
        key = ("train", "callbacks", index)
        yield Site((*key, "name"), callback.name, "callbacks", callback.args, (*key, "args"))


def _named(value: Any, key: Key, role: Role) -> Iterator[Site]:
    if isinstance(value, str):
        yield Site(key, value, role, {}, key)
    elif isinstance(value, (Component, OptimizerComponent)) and value.name is not None:
        additive = value.additive if isinstance(value, MetricComponent) else None
        yield Site((*key, "name"), value.name, role, value.args, (*key, "args"), additive)
    elif is_list(value):
        for index, inner in enumerate(value):
            yield from _named(inner, (*key, index), role)
    elif is_dict(value):
        for name, inner in value.items():
            yield from _named(inner, (*key, name), role)


def named_files(config: RunConfig) -> list[str]:
    """Return the Python files that a config names."""
    files = (site.name.rpartition(":")[0] for site in sites(config))
    return sorted({file for file in files if file.endswith(".py")})


def with_absolute_files(config: RunConfig, folder_of: Callable[[Key], Path]) -> RunConfig:
    """Return a config with absolute paths of `path/file.py:function`, `data.tfds.data_dir` and files of `engine`.

    `runs_dir` only loses its `~`, since it starts at the current directory.

    Args:
        folder_of: maps the key of a relative path to the folder from which the path starts.
    """
    data = config.to_plain()
    for site in sites(config):
        file, colon, function = site.name.rpartition(":")
        if colon and file.endswith(".py"):
            parent: Any = data
            for part in site.key[:-1]:
                parent = parent[part]
            path = Path(os.path.expanduser(file))  # unchanged if there is no such user
            parent[site.key[-1]] = f"{folder_of(site.key).absolute() / path}:{function}"
    data["runs_dir"] = os.path.expanduser(config.runs_dir)
    tfds = config.data.tfds
    if tfds is not None and tfds.data_dir is not None and "://" not in tfds.data_dir:
        folder = folder_of(("data", "tfds", "data_dir")).absolute()
        data["data"]["tfds"]["data_dir"] = str(folder / os.path.expanduser(tfds.data_dir))
    for name in config.engine.file_keys:
        if (file := getattr(config.engine, name)) is not None:
            data["engine"][name] = str(folder_of(("engine", name)).absolute() / os.path.expanduser(file))
    return config.changed(data)


def data_paths(config: RunConfig) -> dict[str, str]:
    """Return texts with a slash in `data.args` that are not URLs, by key, whether or not such a file exists."""
    return {
        Problem(key, "").dotted: text
        for key, text in texts_in(config.data.args, ("data", "args"))
        if "/" in text and "://" not in text and "\n" not in text
    }
