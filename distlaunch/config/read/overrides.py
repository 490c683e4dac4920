"""`--set a.b[0].c=value`: changes to the tree, made before it is validated."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.kind_switch import drop_foreign_keys, kinds_written
from distlaunch.config.read.expected import at
from distlaunch.config.read.tree import Key, Node, TreeBuilder
from distlaunch.config.read.words import show
from distlaunch.config.read.yaml_nodes import PLAIN, parse

# a part of a key: `[0]`, `["a.b"]`, `name` or `.name`
_PART = re.compile(
    r"""\[(?P<index>[0-9]{1,6})\]|\[(?P<quote>["'])(?P<quoted>.*?)(?P=quote)\]|\.?(?P<name>[^.\[\]=]+)"""
)
_EXAMPLE = "write it as train.epochs=3 or train.callbacks[0].name=TerminateOnNaN"


def apply(root: Node, overrides: tuple[str, ...], environ: Mapping[str, str]) -> list[Problem]:
    """Apply overrides to the tree in place, in the order given.

    An override of `strategy.kind` or `engine.kind` drops the keys in the file that only the old kind has, so that one
    setting switches the strategy or the engine.
    """
    problems: list[Problem] = []
    written = kinds_written(root)
    for text in overrides:
        source = f"--set {text}"
        try:
            key, value = _parse(text, source, environ)
            _assign(root, key, value, source)
        except ConfigError as error:
            problems += error.problems
    # do this after all overrides, so that keys of the new kind stay
    drop_foreign_keys(root, written)
    return problems


def key_of(text: str) -> Key:
    """Return the key of an override; empty for a text that is not KEY=VALUE, which `apply` reports."""
    try:
        return split(text)[0]
    except ValueError:
        return ()


def split(text: str) -> tuple[Key, str]:
    """Split an override: `a.b[0]=x` -> (("a", "b", 0), "x").

    Raises:
        ValueError: the text is not KEY=VALUE.
    """
    parts: list[str | int] = []
    position = 0
    while match := _PART.match(text, position):
        if match["name"] is not None and not match["name"].strip():
            break
        if match["name"] is not None and position and match[0][0] != ".":
            break
        part = match["name"].strip() if match["name"] is not None else match["quoted"]
        parts.append(int(match["index"]) if match["index"] is not None else part)
        position = match.end()
    if not parts:
        raise ValueError(f"got {show(text)}, which has no key; {_EXAMPLE}")
    if position >= len(text):
        raise ValueError(f"got {show(text)}, without '='; {_EXAMPLE}")
    if text[position] != "=":
        raise ValueError(f"got {show(text)}, whose key is invalid from {show(text[position:])} on; {_EXAMPLE}")
    return tuple(parts), text[position + 1 :]


def _parse(text: str, source: str, environ: Mapping[str, str]) -> tuple[Key, Node]:
    try:
        key, value = split(text)
    except ValueError as error:
        raise ConfigError(Problem((), str(error), "--set")) from None
    # `--set key=` means null, as in YAML
    if not value.strip():
        return key, Node(None, source)
    try:
        raw = _parse_value(value, source)
    except ConfigError as error:
        raise ConfigError([Problem(key, problem.message, source) for problem in error.problems]) from None
    builder = TreeBuilder(source, environ, numbered=False)
    node = builder.build(raw, key)
    if builder.problems:
        raise ConfigError(builder.problems)
    return key, node


def _parse_value(value: str, source: str) -> yaml.Node:
    """Return the node of a value. Nothing in it is a comment, so that `--set key=#x` is text."""
    if value.lstrip().startswith("#"):
        start = yaml.Mark(source, 0, 0, 0, None, 0)
        return yaml.ScalarNode(PLAIN, value.strip(), start, start)
    raw = parse(value, source, empty=f"got {value!r}; expected a value")
    is_cut = isinstance(raw, yaml.ScalarNode) and raw.tag == PLAIN and "#" in value[raw.end_mark.index :]
    return yaml.ScalarNode(PLAIN, value.strip(), raw.start_mark, raw.end_mark) if is_cut else raw


def texts_as_text(root: Node) -> None:
    """Use the text of each override of a key that accepts only text, so that `--set name=12` is valid."""
    data = root.plain()
    for key, node in root.walk():
        if node.is_override and node.filled and isinstance(node.value, int | float):
            expected = at(key, data)
            if expected is not None and expected.is_text:
                node.value = node.filled


def _assign(root: Node, key: Key, value: Node, source: str) -> None:
    node = root
    for position, part in enumerate(key[:-1]):
        node = _enter(node, key, position, part, source)
    part = _open(node, key, len(key) - 1, source)
    if isinstance(node.value, dict):
        node.value[part] = value
    elif isinstance(node.value, list) and isinstance(part, int):
        # an index one past the end appends
        node.value[part : part + 1] = [value]


def _enter(node: Node, key: Key, position: int, part: str | int, source: str) -> Node:
    """Return the node one step down; create it if there is none."""
    part = _open(node, key, position, source)
    inner = node.child(part)
    if inner is None:
        inner = Node(None, source)
        if isinstance(node.value, dict):
            node.value[part] = inner
        elif isinstance(node.value, list):
            node.value.append(inner)
    return inner


def _open(node: Node, key: Key, position: int, source: str) -> str | int:
    """Make the node a mapping or list, as the key at a position requires, and return the key as the node has it."""
    part = key[position]
    if node.value is None:
        node.value = [] if isinstance(part, int) else {}
    if isinstance(node.value, str) and part in ("name", "args"):
        # a Keras object written as its name alone: `optimizer: adam` becomes `optimizer: {name: adam}`
        node.value = {"name": Node(node.value, node.source)}
    where = Problem(key[:position], "", source).dotted or "the config"
    if isinstance(node.value, list):
        index = int(part) if isinstance(part, int) or part.isdigit() else None
        if index is None:
            raise _error(
                key, f"{where} is a list of {len(node.value)}; choose an item by number, such as {where}[0]", source
            )
        if index > len(node.value):
            raise _error(
                key, f"{where} has {len(node.value)} items; expected an index from 0 to {len(node.value)}", source
            )
        return index
    if not isinstance(node.value, dict):
        raise _error(key, f"{where} is {show(node.value)}, which has no keys; set {where} itself", source)
    return _own_key(node.value, part)


def _own_key(entries: dict[str | int, Node], part: str | int) -> str | int:
    """Return the key as the mapping has it: class weights have whole numbers as keys (`data.class_weight.3=2.0`)."""
    if isinstance(part, str) and part.isdigit() and (not entries or any(isinstance(entry, int) for entry in entries)):
        return int(part)
    return part


def _error(key: Key, message: str, source: str) -> ConfigError:
    return ConfigError(Problem(key, message, source))
