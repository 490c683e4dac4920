"""Relative paths among the arguments of the user's functions: they start from the config's folder, like function files.

If the tasks run in that folder, nothing is changed: a text that happens to be the name of a file remains as it is.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config.read.tree import Key
from distlaunch.config.run import RunConfig

_KEYS: tuple[Key, ...] = (("model", "args"), ("data", "args"), ("data", "preprocessing", "args"))
_FILLED_IN = re.compile(r"[*?\[{%$]")
_LONGEST = 4_096


def with_argument_paths(config: RunConfig, launched_in: Path | None = None) -> tuple[RunConfig, list[str]]:
    """Return a config whose arguments lead to the same files from the current directory, and notes for the user.

    An argument counts as a path if it names an existing file or folder, if it is a pattern such as `part-*.csv` that
    matches one, or if it has a wildcard or placeholder below an existing folder, such as `out/{}.csv`. It is looked up
    in the config's folder, then in the current directory.

    Args:
        launched_in: the directory in which the run was started, which is searched last.
    """
    here, folder = Path.cwd(), config.folder or Path.cwd()
    notes: list[str] = []
    at_home = _is_same(folder, here)

    def resolved(key: Key, text: str) -> str:
        if not _may_be_relative(text):
            return text
        if _leads_somewhere(folder, text):
            return text if at_home else str(folder / text)
        if _leads_somewhere(here, text):
            if "/" in text or "." in text:
                where = f"'{text}' is not in the config's folder, {folder}, but in this directory"
                notes.append(f"{Problem(key, '').dotted}: {where}; paths start from the config's folder: move the file")
            return text
        found = launched_in is not None and _leads_somewhere(launched_in, text)
        return str(launched_in / text) if found and launched_in is not None else text

    plain = config.to_plain()
    changed = False
    for key in _KEYS:
        parent: Any = plain
        for part in key[:-1]:
            parent = parent[part] if parent is not None else None
        if parent is None:
            continue
        args = _each(parent[key[-1]], key, resolved)
        changed |= args != parent[key[-1]]
        parent[key[-1]] = args
    return (config.changed(plain) if changed else config), notes


def with_given_arguments(config: RunConfig, folder: Path, is_given: Callable[[Key], bool]) -> RunConfig:
    """Return a config in which arguments set by `--set` refer to files in the current directory.

    Args:
        folder: the config's folder. If it is the current directory, nothing is changed.
        is_given: returns whether `--set` gave the value of a key.
    """
    here = Path.cwd()
    if _is_same(folder, here):
        return config

    def resolved(key: Key, text: str) -> str:
        found = is_given(key) and _may_be_relative(text) and _leads_somewhere(here, text)
        return str(here / text) if found else text

    plain = config.to_plain()
    for key in _KEYS:
        parent: Any = plain
        for part in key[:-1]:
            parent = parent[part] if parent is not None else None
        if parent is not None:
            parent[key[-1]] = _each(parent[key[-1]], key, resolved)
    return config.changed(plain)


def _each(value: Any, key: Key, change: Callable[[Key, str], str]) -> Any:
    if isinstance(value, str):
        return change(key, value)
    if is_dict(value):
        return {name: _each(inner, (*key, name), change) for name, inner in value.items()}
    if is_list(value):
        return [_each(inner, (*key, number), change) for number, inner in enumerate(value)]
    return value


def _is_same(folder: Path, here: Path) -> bool:
    try:
        return folder.samefile(here)
    except OSError:  # the folder does not exist: the run was moved without it
        return False


def _may_be_relative(text: str) -> bool:
    return bool(text) and len(text) < _LONGEST and text[0] not in "/~$" and "://" not in text and text.isprintable()


def _leads_somewhere(base: Path, text: str) -> bool:
    """Return whether a text names or matches an existing path, or has a placeholder below an existing folder."""
    open_part = _FILLED_IN.search(text)
    try:
        if open_part is None:
            return (base / text).exists()
        if any(True for _ in glob.iglob(text, root_dir=base)):
            return True
        before = text[: open_part.start()].rpartition("/")[0]
        return bool(before) and (base / before).is_dir()
    except (OSError, ValueError, re.error):
        return False
