"""Conversion of a RunConfig to YAML that is read as the same config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config.read.scalars import escape, is_filled_in_later, resolve
from distlaunch.config.read.tree import Key
from distlaunch.config.run import RunConfig
from distlaunch.config.secrets import Secrets

# line separators and the byte order mark, which only double quotes with escapes preserve
_UNUSUAL = re.compile("[\r\x85\u2028\u2029\ufeff]")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        # no `&id001` and `*id001`, for readability
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Quote text that would otherwise be read as another value, by our rules or those of YAML 1.1."""
    # double quotes are the only style of YAML with escapes
    style = '"' if _UNUSUAL.search(value) else None if _reads_as_text(value) else "'"
    return dumper.represent_scalar(  # pyright: ignore[reportUnknownMemberType]
        "tag:yaml.org,2002:str", value, style=style
    )


def _reads_as_text(value: str) -> bool:
    try:
        # `<<` as a key would be a merge
        return isinstance(resolve(value), str) and value != "<<"
    except ValueError:
        return False


class _Written(str):
    """A reference `${NAME}` in place of a value. Quotes are left out for values that are not text, to keep the type."""

    __slots__ = ("is_text",)
    is_text: bool


def _written(dumper: yaml.SafeDumper, value: _Written) -> yaml.ScalarNode:
    return dumper.represent_scalar(  # pyright: ignore[reportUnknownMemberType]
        "tag:yaml.org,2002:str", str(value), style="'" if value.is_text else None
    )


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_Written, _written)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: _text(dumper, str(path)))


def dump_config(config: RunConfig) -> str:
    """Return the whole config as YAML, including defaults.

    `${` in values becomes `$${`, so that nothing is substituted again. A secret from a variable remains `${NAME}`.
    `${run_dir}` in arguments of callbacks remains, since it is the directory of the run that reads the text.
    """
    return yaml.dump(
        _escaped(config.to_plain(), config.secrets), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
    )


def dump_plain(config: Mapping[str, Any]) -> str:
    """Return a config made in Python as YAML, as its author would have written it.

    Raises:
        yaml.YAMLError: a value has a type that YAML does not support.
    """
    return yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _escaped(value: Any, secrets: Secrets, key: Key = ()) -> Any:
    if is_dict(value):
        return {name: _escaped(inner, secrets, (*key, name)) for name, inner in value.items()}
    if is_list(value):
        return [_escaped(inner, secrets, (*key, index)) for index, inner in enumerate(value)]
    if (found := secrets.reference(key, value)) is not None:
        written = _Written(found.text)
        written.is_text = isinstance(value, str)
        return written
    return escape(value, keep_run_dir=is_filled_in_later(key)) if isinstance(value, str) else value
