"""Reads the settings of runs from their configs, and finds those that differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.differences import flat
from distlaunch.config.read.scalars import Unfilled
from distlaunch.config.read.text import read_text
from distlaunch.config.read.tree import TreeBuilder
from distlaunch.config.read.yaml_nodes import parse
from distlaunch.config.secrets import secrets_in

Settings = dict[str, Any]
"""Values of a config by dotted key, such as `train.epochs`; a list is one value."""
_OF_THE_RUN = ("name", "runs_dir")
_NAMED = ("compile.optimizer", "compile.loss")
"""Settings that are a name, or a mapping with a name and arguments."""
_VAGUE = frozenset(
    {"args", "class", "every", "function", "kind", "max", "metric", "min", "mode", "name", "step", "steps"}
)
"""Last parts of keys that are not clear without the part before them."""


def read_settings(run: RunDir) -> Settings:
    """Return the settings of a run, without its name and folder; empty for a run of a script.

    The config is not validated: a run of another version can be compared, too. Secrets that were written into it are
    masked, since comparisons are shown to other people.

    Raises:
        ConfigError: the config is damaged.
        OSError: it cannot be read.
    """
    if not run.has_config():
        return {}
    name = str(run.config)
    builder = TreeBuilder(name, Unfilled({}), unset="")
    root = builder.build(parse(read_text(run.config), name))
    if builder.problems:
        raise ConfigError(builder.problems)
    public = secrets_in(root, {}, all_references=True).public(root.plain())
    found = {".".join(map(str, key)): json.loads(text) for key, text in flat(public)}
    for key in _NAMED:
        if isinstance(found.get(key), str):  # short for {name: ...}
            found = {f"{key}.name" if each == key else each: value for each, value in found.items()}
    return {key: value for key, value in found.items() if key not in _OF_THE_RUN}


def differing_keys(settings: Iterable[Settings]) -> list[str]:
    """Return the keys whose values are not the same in all settings, in the order of the config.

    A key with an empty mapping is left out if another run has entries in this mapping, since each entry is a key. An
    empty `args` is always left out, since a config may lack it. If the kind of a section differs, such as
    `strategy.kind`, a key of this section that some runs lack is left out, too, unless its values differ among the
    other runs. Empty settings, such as those of a script, are ignored.
    """
    known = [each for each in settings if each]
    keys = list(dict.fromkeys(key for each in known for key in each))
    return [key for key in keys if _differs(key, known) and not _is_explained(key, keys, known)]


def _differs(key: str, known: Sequence[Settings]) -> bool:
    return any((key in each) != (key in known[0]) or each.get(key) != known[0].get(key) for each in known)


def _is_explained(key: str, keys: Iterable[str], known: Sequence[Settings]) -> bool:
    """Return True if another key shows why a key differs."""
    having = [each for each in known if key in each]
    is_empty = any(each[key] == {} for each in having)
    if is_empty and (key.endswith(".args") or any(other.startswith(f"{key}.") for other in keys)):
        return True
    kind = f"{key.split('.')[0]}.kind"
    return key != kind and len(having) < len(known) and not _differs(key, having) and _differs(kind, known)


def short_names(keys: Sequence[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """Return a short name for each key: as many of its last parts as are needed to distinguish it from the others.

    Args:
        taken: names that are used for something else.
    """
    used, names = set(taken), dict[str, str]()
    for key in keys:
        parts = key.split(".")
        last = len(parts) - (2 if parts[-1] in _VAGUE and len(parts) > 1 else 1)
        endings = [".".join(parts[start:]) for start in range(last, -1, -1)]
        others = [f".{other}" for other in keys if other != key]
        names[key] = next(
            (end for end in endings if end not in used and not any(each.endswith(f".{end}") for each in others)), key
        )
    return names


def setting_text(value: Any) -> str:
    """Return a value as it is written in YAML: strings without quotes, `true`, `null`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
