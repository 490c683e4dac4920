"""Secrets in a config: files of a run contain the reference `${NAME}` and not its value."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.base.secret_mask import (
    MASK,
    credentials_in,
    has_credentials,
    is_distinctive,
    is_secret,
    is_secret_at,
    is_secret_name,
    without_credentials,
)
from distlaunch.config.read.scalars import VARIABLE, default_of
from distlaunch.config.read.tree import Key, Node, texts_in


@dataclass(frozen=True)
class Reference:
    """The origin of a value.

    Attributes:
        text: the text as written, such as `https://${USER}:${PASSWORD}@host`.
        value: the value that it stands for.
    """

    text: str
    value: Any

    @property
    def public(self) -> str:
        """The text without defaults, which may be secrets too."""
        return _without_defaults(self.text, names_in(self.text))


@dataclass(frozen=True)
class Secrets:
    """The secrets of a config.

    Attributes:
        references: references by the keys of the values.
        variables: values of the variables that they name, if these are set.
    """

    references: Mapping[Key, Reference] = field(default_factory=dict[Key, Reference])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def reference(self, key: Key, value: Any) -> Reference | None:
        """Return the reference that the value at a key comes from, or None if it was written as it is."""
        found = self.references.get(key)
        if found is not None and found.value == value and type(found.value) is type(value):
            return found
        # validation moves some values to other keys: `optimizer: adam` becomes a section with a name
        if not isinstance(value, str) or not is_distinctive(value):
            return None
        return next((each for each in self.references.values() if value == each.value), None)

    def public(self, value: Any, key: Key = ()) -> Any:
        """Return plain data of a config in a form for records and checkpoints.

        References replace their values, and `***` replaces other secrets, such as passwords in URLs.
        """
        if is_dict(value):
            return {name: self.public(inner, (*key, name)) for name, inner in value.items()}
        if is_list(value):
            return [self.public(inner, (*key, index)) for index, inner in enumerate(value)]
        if (found := self.reference(key, value)) is not None:
            return found.public
        if is_secret_at(key, value):
            return MASK
        return without_credentials(value) if isinstance(value, str) else value

    def replaced_at(self, keys: Sequence[Key], other: Secrets) -> Secrets:
        """Return the secrets with those of another config at some keys and below them."""

        def is_there(key: Key) -> bool:
            return any(key[: len(each)] == each for each in keys)

        kept = {key: found for key, found in self.references.items() if not is_there(key)}
        taken = {key: found for key, found in other.references.items() if is_there(key)}
        return Secrets({**kept, **taken}, {**other.variables, **self.variables})

    @staticmethod
    def values(plain: Any) -> list[str]:
        """Return the values in plain data that must not be printed, judged by their keys or their content."""
        texts = list(texts_in(plain, ()))
        secret = {text for key, text in texts if is_secret_at(key, text)}
        return sorted(secret.union(*(credentials_in(text) for _, text in texts)))


def names_in(text: str) -> list[str]:
    """Return the names of the variables in a text."""
    return [_name(found) for found in _variables(text)]


def _stands_for_secret(text: str, key: Key, value: Any, environ: Mapping[str, str]) -> bool:
    """Return whether a text with variables stands for a secret, judged by names, values, and the text's key."""
    # numbers have names such as `MAX_TOKENS`
    if not isinstance(value, str):
        return False
    if is_secret_at(key, value):
        return True
    for found in _variables(text):
        name, default = _name(found), default_of(found)
        # the value of a variable that is not set here may be a secret in the shell of another command
        if name not in environ and is_secret_name(name):
            return True
        given = environ.get(name, default)
        if is_secret(name, given) or has_credentials(given):
            return True
    return False


def secrets_in(root: Node, environ: Mapping[str, str], *, all_references: bool = False) -> Secrets:
    """Return the secrets of a config as it was written.

    References to variables that are set lose their defaults: a later command without the variable fails, and does not
    silently use another value.

    Args:
        all_references: whether each reference stands for a secret, as in the files of a run.
    """
    found = {
        key: Reference(_without_defaults(text, environ), value)
        for key, text, value in _scalars(root, ())
        if names_in(text) and (all_references or _stands_for_secret(text, key, value, environ))
    }
    names = {name for each in found.values() for name in names_in(each.text)}
    return Secrets(found, {name: environ[name] for name in sorted(names) if name in environ})


def _scalars(node: Node, key: Key) -> Iterator[tuple[Key, str, Any]]:
    if is_dict(node.value):
        for name, inner in node.value.items():
            yield from _scalars(inner, (*key, name))
    elif is_list(node.value):
        for index, inner in enumerate(node.value):
            yield from _scalars(inner, (*key, index))
    elif node.text is not None and "${" in node.text:
        yield key, node.text, node.value


def _variables(text: str) -> Iterator[re.Match[str]]:
    return (found for found in VARIABLE.finditer(text) if found[1] is not None)


def _without_defaults(text: str, names: Container[str]) -> str:
    """Return a text in which the variables with these names have no defaults."""

    def shown(found: re.Match[str]) -> str:
        return f"${{{_name(found)}}}" if found[1] is not None and _name(found) in names else found[0]

    return VARIABLE.sub(shown, text)


def _name(found: re.Match[str]) -> str:
    return found[1].partition(":")[0]
