"""YAML text -> PyYAML's nodes, which know their lines. No object is constructed, and nesting has a limit.

`yaml.compose` does the work. PyYAML's own composer is used on the events of libyaml: the composer in C recurses without
a limit and ends the process at some 50,000 brackets, and it does not let an anchor be defined again.
"""

from __future__ import annotations

import functools
import re
from typing import Any, cast

import yaml
from yaml.composer import Composer, ComposerError

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.read.yaml_errors import MAX_DEPTH, TOO_DEEP, explain

PLAIN = "plain"
"""The tag of a scalar that is written without quotes or block indicator, so that it may be a number or the like."""
_TEXT = "text"
# characters other than those that YAML 1.1 calls printable
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# a variable, whose braces would begin a mapping inside [ ] and { }
_VARIABLE = re.compile(r"\$\{[^{}\n\"']*\}")
# each character of a variable that has a meaning in YAML, and a stand-in without a meaning
_STAND_INS = {ord(character): 0xF8D0 + index for index, character in enumerate("{}[],:#")}
_RESTORED = {stand_in: character for character, stand_in in _STAND_INS.items()}
_START = "; start with `model:`, `data:` and `strategy:`, or let `distlaunch init` write a config"
_PARTS: tuple[type, ...] = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)
_Loader: Any = type("_Loader", _PARTS, {"__init__": _PARTS[-1].__init__})


def _shielded(text: str) -> str:
    """Return the text with variables whose special characters are replaced, so that YAML reads them as plain text."""
    if any(chr(stand_in) in text for stand_in in _RESTORED):
        return text
    return _VARIABLE.sub(lambda match: match[0].translate(_STAND_INS), text)


def parse(text: str, name: str, empty: str = f"the file is empty{_START}") -> yaml.Node:
    """Return the root node of the only document of a file. An alias is the same node as its anchor.

    Args:
        name: the name of the source in messages, such as `run.yaml`.
        empty: the message for an empty text.

    Raises:
        ConfigError: the text is not YAML, or uses tags, several documents, or nesting deeper than any config.
    """
    found = _UNPRINTABLE.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise _error(name, line, f"a control character (0x{ord(found[0]):02x}) that YAML does not allow; remove it")
    loader: Any = functools.partial(_NodeLoader, name=name)
    try:
        root: yaml.Node | None = yaml.compose(_shielded(text), Loader=loader)
    except ComposerError as error:
        mark: Any = error.problem_mark
        message = "a second document starts here ('---'); expected one config in a file"
        raise _error(name, mark.line + 1, message) from None
    except yaml.YAMLError as error:
        line, message = explain(error, text)
        raise _error(name, line, message) from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == PLAIN and not root.value):
        raise ConfigError(Problem((), empty, name))
    return root


def line_of(node: yaml.Node) -> int:
    """Return the line where a node begins, from 1."""
    return node.start_mark.line + 1


class _NodeLoader(_Loader):
    """Composes nodes, and refuses YAML features that a config must not use."""

    def __init__(self, stream: str, name: str) -> None:
        super().__init__(stream)  # pyright: ignore[reportUnknownMemberType]
        self.anchors: dict[str, yaml.Node] = {}
        self._name = name
        self._open: list[str | None] = []
        """Anchors of the lists and mappings around the next node."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        line = event.start_mark.line + 1
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if isinstance(event, yaml.AliasEvent):
            self._check_alias(str(event.anchor), line)
            node = self._composed(parent, index)
            self._check_key(node, line, is_key=is_key)
            return node
        # the tag `!` alone turns a scalar into text
        if event.tag not in (None, "!"):
            message = f"got the tag '{event.tag.replace('tag:yaml.org,2002:', '!!')}'; tags are not supported; "
            hint = "remove the tag; if the value is text that begins with '!', put the text in quotes"
            raise _error(self._name, line, message + hint)
        self.anchors.pop(event.anchor, None)  # an anchor may be defined again
        if isinstance(event, yaml.ScalarEvent):
            return self._composed(parent, index)
        self._check_key(event, line, is_key=is_key)
        self._open.append(event.anchor)
        if len(self._open) > MAX_DEPTH:
            raise _error(self._name, line, TOO_DEEP)
        node = self._composed(parent, index)
        self._open.pop()
        return node

    def _composed(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        return cast(yaml.Node, super().compose_node(parent, index))  # pyright: ignore[reportUnknownMemberType]

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        event = self.peek_event()
        node = cast(yaml.ScalarNode, super().compose_scalar_node(anchor))  # pyright: ignore[reportUnknownMemberType]
        node.value = node.value.translate(_RESTORED)
        node.tag = PLAIN if event.implicit[0] and event.tag is None else _TEXT
        return node

    def resolve(self, kind: type, value: Any, implicit: Any) -> str:
        """Resolve a scalar by the rules of YAML 1.2 (`scalars.resolve`) instead of 1.1."""
        return _TEXT

    def _check_alias(self, anchor: str, line: int) -> None:
        if anchor in self._open:
            message = f"the alias *{anchor} is inside its own anchor &{anchor}; a config cannot contain itself"
            raise _error(self._name, line, message)
        if anchor not in self.anchors:
            message = f"the alias *{anchor} has no anchor &{anchor} above it; quote text that begins with '*'"
            raise _error(self._name, line, message)

    def _check_key(self, node: yaml.Node | yaml.Event, line: int, *, is_key: bool) -> None:
        if not is_key or isinstance(node, yaml.ScalarNode):
            return
        what = "list" if isinstance(node, yaml.SequenceNode | yaml.SequenceStartEvent) else "mapping"
        message = f"a key must be a word, not a {what}; write `key: value`; quote what begins with [ or {{"
        raise _error(self._name, line, message)


def _error(name: str, line: int, message: str) -> ConfigError:
    return ConfigError(Problem((), message, f"{name}:{line}" if line else name))
