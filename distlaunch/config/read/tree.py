"""The config as written: values with the place each came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.read.scalars import Scalar, is_filled_in_later, resolve, substitute, unusable
from distlaunch.config.read.yaml_events import MAX_DEPTH, Raw

Key = tuple[str | int, ...]
MAX_NODES = 50_000


@dataclass
class Node:
    """A value and where it stands: `run.yaml:12`, or `--set a.b=c`."""

    value: Scalar | list[Node] | dict[str | int, Node]
    source: str

    def plain(self) -> object:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def nearest(self, key: Key) -> Node:
        """The node at a key, or the closest one around it that was written."""
        node = self
        for part in key:
            inner = node.child(part)
            if inner is None:
                break
            node = inner
        return node

    def children(self) -> Iterable[Node]:
        if isinstance(self.value, dict):
            return self.value.values()
        return self.value if isinstance(self.value, list) else ()

    def child(self, part: str | int) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(part)
        if isinstance(self.value, list) and isinstance(part, int) and 0 <= part < len(self.value):
            return self.value[part]
        return None


class TreeBuilder:
    """Turns raw YAML into nodes; collects what is wrong and goes on."""

    def __init__(self, name: str, environ: Mapping[str, str], *, numbered: bool = True) -> None:
        """With `numbered=False` all of the text is one line, so that its name alone says where it stands."""
        self.problems: list[Problem] = []
        self._name = name
        self._environ = environ
        self._numbered = numbered
        self._num_nodes = 0
        self._depth = 0

    def build(self, raw: Raw, key: Key = ()) -> Node:
        """The node of a value; aliases become copies.

        Raises:
            ConfigError: aliases blow the config up beyond all bounds.
        """
        return self._build(raw, key, raw.line)

    def _build(self, raw: Raw, key: Key, line: int) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            message = f"aliases make this config larger than {MAX_NODES:,} values; write out what you need"
            raise ConfigError(Problem((), message, self._source(line)))
        if raw.kind == "scalar":
            return Node(self._scalar(raw, key, line), self._source(line))
        self._depth += 1
        if self._depth > MAX_DEPTH:
            message = f"aliases nest deeper than {MAX_DEPTH} levels; write out what you need"
            raise ConfigError(Problem((), message, self._source(line)))
        value = self._mapping(raw, key) if raw.kind == "map" else self._list(raw, key)
        self._depth -= 1
        return Node(value, self._source(line))

    def _list(self, raw: Raw, key: Key) -> list[Node]:
        return [self._build(child, (*key, index), child.line) for index, child in enumerate(raw.children)]

    def _mapping(self, raw: Raw, key: Key) -> dict[str | int, Node]:
        entries: dict[str | int, Node] = {}
        lines: dict[str | int, int] = {}
        merged: dict[str | int, Node] = {}
        for name_node, child in zip(raw.children[::2], raw.children[1::2], strict=True):
            line = name_node.line
            if name_node.plain and name_node.text == "<<":
                merged |= self._merged(child, key, line)
                continue
            name = self._key(name_node, key)
            if name is None:
                continue
            if name in entries:
                self._problem(
                    (*key, name), f"the key is there already, in line {lines[name]}; remove one of them", line
                )
                continue
            lines[name] = line
            entries[name] = self._build(child, (*key, name), line)
        return {**merged, **entries}

    def _merged(self, child: Raw, key: Key, line: int) -> dict[str | int, Node]:
        """Entries of `<<: *base` or `<<: [*first, *second]`; the first wins."""
        found: dict[str | int, Node] = {}
        for source in child.children if child.kind == "list" else [child]:
            if source.kind != "map":
                self._problem(
                    (*key, "<<"), "expected a mapping, or a list of mappings, to merge, such as `<<: *defaults`", line
                )
                continue
            node = self._build(source, key, source.line)
            assert isinstance(node.value, dict)
            found = {**node.value, **found}
        return found

    def _key(self, node: Raw, key: Key) -> str | int | None:
        """A key is text; whole numbers are kept for the mappings that want them, such as class weights."""
        problem = unusable(node.text)
        value: Scalar = node.text
        try:
            value = resolve(node.text) if node.plain else node.text
        except ValueError as error:
            problem = str(error)
        if problem is None and isinstance(value, int | str) and not isinstance(value, bool):
            return value
        text = node.text or "(empty)"
        self._problem(
            key, problem or f"got the key {text}; a key must be text; put it in quotes: '{node.text}'", node.line
        )
        return None

    def _scalar(self, raw: Raw, key: Key, line: int) -> Scalar:
        try:
            later = is_filled_in_later(key)
            text = substitute(raw.text, self._environ, keep_run_dir=later) if "$" in raw.text else raw.text
            problem = unusable(text)
            if problem is None:
                return resolve(text) if raw.plain else text
        except ValueError as error:
            problem = str(error)
        self._problem(key, problem, line)
        return None

    def _problem(self, key: Key, message: str, line: int) -> None:
        self.problems.append(Problem(key, message, self._source(line)))

    def _source(self, line: int) -> str:
        return f"{self._name}:{line}" if self._numbered else self._name
