"""YAML text -> raw nodes that remember their lines. No recursion, no object construction, no limits on honest files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.read.yaml_errors import explain

MAX_DEPTH = 60
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_START = "; start with `model:`, `data:` and `strategy:`, or let `distlaunch init` write a config"


@dataclass
class Raw:
    """A YAML node. An alias is the very node that its anchor names."""

    kind: Literal["scalar", "list", "map"]
    line: int
    text: str = ""
    plain: bool = False
    children: list[Raw] = field(default_factory=list)
    """Items of a list; keys and values in turn of a map."""


def parse(text: str, name: str) -> Raw:
    """The one document of a file.

    Args:
        name: what the source is called in messages, e.g. `run.yaml`.

    Raises:
        ConfigError: the text is not YAML, or uses tags, several documents, or nesting deeper than any config.
    """
    found = _UNPRINTABLE.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise _error(name, line, f"a control character (0x{ord(found[0]):02x}) that YAML does not allow; remove it")
    reader = _Reader(name)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            reader.take(event)
    except yaml.YAMLError as error:
        line, message = explain(error, text)
        raise _error(name, line, message) from None
    if reader.root is None or (reader.root.kind == "scalar" and reader.root.plain and not reader.root.text):
        raise ConfigError(Problem((), f"the file is empty{_START}", name))
    return reader.root


class _Reader:
    """Builds the tree from parser events, with a stack of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Raw | None = None
        self._open: list[tuple[Raw, str | None]] = []
        self._anchors: dict[str, Raw] = {}

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise _error(self.name, line, "a second document starts here ('---'); expected one config in a file")
        if isinstance(event, yaml.AliasEvent):
            self._add(self._target(str(event.anchor), line), line)
        elif isinstance(event, yaml.NodeEvent):
            self._node(event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            node, anchor = self._open.pop()
            if anchor is not None:
                self._anchors[anchor] = node

    def _node(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!"):
            raise _error(
                self.name,
                line,
                f"got the tag '{event.tag.replace('tag:yaml.org,2002:', '!!')}'; tags are not supported; "
                "write the value without it, and in quotes if it is text that begins with '!'",
            )
        if isinstance(event, yaml.ScalarEvent):
            # implicit[0]: written plainly, without quotes or block indicator
            node = Raw("scalar", line, event.value, plain=bool(event.implicit[0]) and event.tag is None)
            if event.anchor is not None:
                self._anchors[event.anchor] = node
            self._add(node, line)
            return
        node = Raw("list" if isinstance(event, yaml.SequenceStartEvent) else "map", line)
        self._add(node, line)
        self._open.append((node, event.anchor))
        if len(self._open) > MAX_DEPTH:
            raise _error(
                self.name, line, f"nested deeper than {MAX_DEPTH} levels; expected a handful. Is a bracket left open?"
            )

    def _add(self, node: Raw, line: int) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1][0]
        if parent.kind == "map" and len(parent.children) % 2 == 0 and node.kind != "scalar":
            raise _error(
                self.name,
                line,
                f"a key must be a word, not a {_NAMES[node.kind]}; write `key: value`; quote what begins with [ or {{",
            )
        parent.children.append(node)

    def _target(self, anchor: str, line: int) -> Raw:
        if any(name == anchor for _, name in self._open):
            raise _error(
                self.name,
                line,
                f"the alias *{anchor} stands inside its own anchor &{anchor}; a config cannot contain itself",
            )
        if anchor not in self._anchors:
            raise _error(
                self.name,
                line,
                f"the alias *{anchor} has no anchor &{anchor} above it; quote text that begins with '*'",
            )
        return self._anchors[anchor]


_NAMES = {"list": "list", "map": "mapping"}


def _error(name: str, line: int, message: str) -> ConfigError:
    return ConfigError(Problem((), message, f"{name}:{line}" if line else name))
