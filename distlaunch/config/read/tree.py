"""The config as a tree of values, each with the place where it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config.read.scalars import Scalar, UnsetError, is_filled_in_later, resolve, substitute, unusable
from distlaunch.config.read.yaml_errors import MAX_DEPTH
from distlaunch.config.read.yaml_nodes import PLAIN, line_of

Key = tuple[str | int, ...]
MAX_NODES = 50_000  # aliases of aliases grow exponentially ("billion laughs")


@dataclass
class Node:
    """A value and where it stands: `run.yaml:12`, or `--set a.b=c`.

    Attributes:
        text: how a scalar was written; None for a value that is not a scalar.
        filled: `text` with the values of variables.
    """

    value: Scalar | list[Node] | dict[str | int, Node]
    source: str
    text: str | None = None
    filled: str | None = None

    @property
    def is_override(self) -> bool:
        """True if the value was given by `--set`."""
        return self.source.startswith("--set ")

    def plain(self) -> object:
        """Return the value without its sources."""
        if is_dict(self.value):
            return {key: node.plain() for key, node in self.value.items()}
        if is_list(self.value):
            return [node.plain() for node in self.value]
        return self.value

    def nearest(self, key: Key) -> Node:
        """Return the node at a key, or the closest one around it that was written."""
        node = self
        for part in key:
            inner = node.child(part)
            if inner is None:
                break
            node = inner
        return node

    def at(self, key: Key) -> Node | None:
        """Return the node at a key, or None if it was not written."""
        node: Node | None = self
        for part in key:
            node = None if node is None else node.child(part)
        return node

    def children(self) -> Iterable[Node]:
        if is_dict(self.value):
            return self.value.values()
        return self.value if is_list(self.value) else ()

    def walk(self, key: Key = ()) -> Iterator[tuple[Key, Node]]:
        """Yield each node within this one, with its key from here."""
        entries = self.value.items() if is_dict(self.value) else enumerate(self.children())
        for part, inner in entries:
            yield (*key, part), inner
            yield from inner.walk((*key, part))

    def child(self, part: str | int) -> Node | None:
        if is_dict(self.value):
            return self.value.get(part)
        if is_list(self.value) and isinstance(part, int) and 0 <= part < len(self.value):
            return self.value[part]
        return None


class TreeBuilder:
    """Turns YAML nodes into values. It collects problems and continues."""

    def __init__(self, name: str, environ: Mapping[str, str], *, numbered: bool = True, unset: str = "") -> None:
        """Begin a tree.

        Args:
            numbered: whether sources have line numbers; False for a text of one line.
            unset: advice for a variable that is not set; empty for the usual advice.
        """
        self._unset = unset
        self.problems: list[Problem] = []
        self._name = name
        self._environ = environ
        self._numbered = numbered
        self._num_nodes = 0
        self._depth = 0

    def build(self, raw: yaml.Node, key: Key = ()) -> Node:
        """Return the node of a value; aliases become copies.

        Raises:
            ConfigError: aliases expand the config beyond the limits.
        """
        return self._build(raw, key, line_of(raw))

    def _build(self, raw: yaml.Node, key: Key, line: int) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            message = f"aliases make this config larger than {MAX_NODES:,} values; write out what you need"
            raise ConfigError(Problem((), message, self._source(line)))
        if isinstance(raw, yaml.ScalarNode):
            filled = self._filled(raw.value, key, line)
            value = None if filled is None else self._scalar(raw, filled, key, line)
            return Node(value, self._source(line), raw.value, filled)
        # the parser's own limit does not apply to expanded aliases
        self._depth += 1
        if self._depth > MAX_DEPTH:
            message = f"aliases nest deeper than {MAX_DEPTH} levels; write out what you need"
            raise ConfigError(Problem((), message, self._source(line)))
        value = self._mapping(raw, key) if isinstance(raw, yaml.MappingNode) else self._list(raw, key)
        self._depth -= 1
        return Node(value, self._source(line))

    def _list(self, raw: yaml.Node, key: Key) -> list[Node]:
        return [self._build(child, (*key, index), line_of(child)) for index, child in enumerate(raw.value)]

    def _mapping(self, raw: yaml.MappingNode, key: Key) -> dict[str | int, Node]:
        entries: dict[str | int, Node] = {}
        lines: dict[str | int, int] = {}
        merged: dict[str | int, Node] = {}
        for name_node, child in raw.value:
            line = line_of(name_node)
            if name_node.tag == PLAIN and name_node.value == "<<":
                if "<<" in lines:
                    message = f"duplicate key, first defined in line {lines['<<']}; write one, as in `<<: [*a, *b]`"
                    self._problem((*key, "<<"), message, line)
                lines["<<"] = line
                merged |= self._merged(child, key, line)
                continue
            name = self._key(name_node, key)
            if name is None:
                continue
            if name in entries:
                self._problem(
                    (*key, name), f"duplicate key, first defined in line {lines[name]}; remove one of them", line
                )
                continue
            lines[name] = line
            entries[name] = self._build(child, (*key, name), line)
        # as YAML defines, entries of the mapping itself override merged ones
        return {**merged, **entries}

    def _merged(self, child: yaml.Node, key: Key, line: int) -> dict[str | int, Node]:
        """Return the entries of `<<: *base` or `<<: [*first, *second]`. If both have a key, the first wins."""
        found: dict[str | int, Node] = {}
        for source in child.value if isinstance(child, yaml.SequenceNode) else [child]:
            if not isinstance(source, yaml.MappingNode):
                self._problem(
                    (*key, "<<"), "expected a mapping, or a list of mappings, to merge, such as `<<: *defaults`", line
                )
                continue
            node = self._build(source, key, line_of(source))
            assert is_dict(node.value)
            found = {**node.value, **found}  # the first wins
        return found

    def _key(self, node: yaml.ScalarNode, key: Key) -> str | int | None:
        """Return a key as text, or None if it is invalid.

        Whole numbers stay numbers, for mappings such as class weights.
        """
        text: str = node.value
        problem = unusable(text)
        value: Scalar = text
        try:
            value = resolve(text) if node.tag == PLAIN else text
        except ValueError as error:
            problem = str(error)
        if problem is None and isinstance(value, int | str) and not isinstance(value, bool):
            return value
        message = f"got the key {text or '(empty)'}; a key must be text; put it in quotes: '{text}'"
        self._problem(key, problem or message, line_of(node))
        return None

    def _filled(self, text: str, key: Key, line: int) -> str | None:
        """Return a text with the values of its variables, or None if that is impossible."""
        try:
            later = is_filled_in_later(key)
            filled = substitute(text, self._environ, keep_run_dir=later) if "$" in text else text
            problem = unusable(filled)
            if problem is None:
                return filled
        except UnsetError as error:
            problem = f"the environment variable {error.name} is not set; {self._unset}" if self._unset else str(error)
        except ValueError as error:
            problem = str(error)
        self._problem(key, problem, line)
        return None

    def _scalar(self, raw: yaml.ScalarNode, filled: str, key: Key, line: int) -> Scalar:
        try:
            return resolve(filled) if raw.tag == PLAIN else filled
        except ValueError as error:
            self._problem(key, str(error), line)
            return None

    def _problem(self, key: Key, message: str, line: int) -> None:
        self.problems.append(Problem(key, message, self._source(line)))

    def _source(self, line: int) -> str:
        return f"{self._name}:{line}" if self._numbered else self._name


def texts_in(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """Yield the texts in plain data of a config, each with its key."""
    if is_dict(value):
        for name, inner in value.items():
            yield from texts_in(inner, (*key, name))
    elif is_list(value):
        for index, inner in enumerate(value):
            yield from texts_in(inner, (*key, index))
    elif isinstance(value, str):
        yield key, value
