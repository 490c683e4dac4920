"""Writes the winner of `distlaunch tune` into a copy of the config, with its comments where that is possible."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from distlaunch.base.errors import DistlaunchError, UsageError
from distlaunch.base.run_dir import write_given_file
from distlaunch.config.dump import dump_plain
from distlaunch.config.read.load import dump_config, load_config
from distlaunch.config.read.text import folder_of, is_stream, read_text
from distlaunch.config.read.tree import Key
from distlaunch.config.read.yaml_nodes import parse
from distlaunch.config.run import RunConfig, as_run_name
from distlaunch.tune.candidates import Candidate
from distlaunch.tune.tuning import TuneResult


def check_target(file: str, source: str) -> None:
    """Raise UsageError if a file cannot be written, before anything is measured.

    A regular file is replaced, so that its folder must be writable.

    Args:
        source: the user's config file, which is never overwritten.
    """
    path = Path(file)
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise UsageError(f"--write: got {file}, which is the config itself; expected another file")
    if path.is_dir():
        raise UsageError(f"--write: got {file}, which is a directory; expected a file name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--write: got {file}, but its directory does not exist; create it first")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    folder = Path(os.path.realpath(path)).parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        hint = "name a file in a directory to which you can write"
        raise UsageError(f"--write: got {file}, but {folder} cannot be written to ({error.strerror}); {hint}") from None


def write_winner(
    source: str, target: str, environ: Mapping[str, str], result: TuneResult, exports: Sequence[str]
) -> None:
    """Write a copy of the config with the keys of the winner.

    Args:
        source: the user's config file.
        environ: the environment with which the config was read.
        exports: commands that set the winner's environment variables, for which there are no keys.
    """
    assert result.winner is not None, "something was measured"
    candidate = result.winner.candidate
    own_text = None if is_stream(Path(source)) else read_text(Path(source))
    text = None if own_text is None else changed_text(own_text, candidate.keys, source)
    is_changed = result.winner is not result.untuned
    comments = [f"# tuned by distlaunch: {candidate.name if is_changed else 'nothing faster was found'}"]
    if exports:
        comments += ["# this file does not contain the following setting; set it before you train:"]
        comments += [f"#   {line}" for line in exports]
    if text is None or not _reads_as(text, candidate, Path(target), environ):
        # the text cannot be kept, for example because of another folder, overrides, or YAML that cannot be edited
        comments.append("# complete config with all defaults")
        config = candidate.config
        if config.name == as_run_name(Path(source).stem) and not (own_text and _has_name(own_text, source)):
            # without this, the copy would continue the runs of the old file, whose name is only its default
            config = config.model_copy(update={"name": None})
        text = dump_config(config)
    try:
        write_given_file(Path(target), "\n".join(comments) + "\n" + text)
    except OSError as error:
        raise UsageError(f"--write: {target}: {error.strerror}") from None


def _reads_as(text: str, candidate: Candidate, target: Path, environ: Mapping[str, str]) -> bool:
    """Return True if the text, in the folder of the target, is read as the candidate's config."""
    probe = folder_of(target) / f".{target.name}.distlaunch-tune.yaml"
    try:
        probe.write_text(text, encoding="utf-8")
        return _comparable(load_config(probe, (), environ).config) == _comparable(candidate.config)
    except (DistlaunchError, OSError):
        return False
    finally:
        probe.unlink(missing_ok=True)


def _has_name(text: str, name: str) -> bool:
    root = parse(text, name)
    return isinstance(root, yaml.MappingNode) and any(key.value == "name" for key, _ in root.value)


def _comparable(config: RunConfig) -> dict[str, Any]:
    return {**config.to_plain(), "resume": None, "name": None}


def changed_text(text: str, changes: Mapping[Key, Any], name: str = "config") -> str | None:
    """Return the text of a config with other values, with all its comments and its order.

    Returns:
        None if the text has a form that cannot be edited.
    """
    for key, value in changes.items():
        root = parse(text, name)
        edited = _with_value(text, root, tuple(map(str, key)), value)
        if edited is None:
            return None
        text = edited
    return text


def _with_value(text: str, root: yaml.Node, key: tuple[str, ...], value: Any) -> str | None:
    node, depth = root, 0
    while True:
        if not isinstance(node, yaml.MappingNode) or not node.value:
            return None
        name = key[depth]
        found = next(((own, inner) for own, inner in node.value if own.value == name), None)
        if found is None:
            return _with_new_key(text, node, key[depth:], value)
        depth += 1
        if depth == len(key):
            return _with_replaced(text, found[0], found[1], value)
        node = found[1]


def _with_replaced(text: str, key: yaml.Node, node: yaml.Node, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        # a block ends where the next key begins: keep the lines between, which are comments on what follows
        last = _last_scalar(node)
        start, end = key.end_mark.index, last.end_mark.index
        return f"{text[:start]}: {_flow(value)}{text[end:]}"
    return f"{text[:start]}{_flow(value)}{text[end:]}"


def _last_scalar(node: yaml.Node) -> yaml.Node:
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _with_new_key(text: str, node: yaml.MappingNode, key: tuple[str, ...], value: Any) -> str:
    for name in reversed(key[1:]):
        value = {name: value}
    if node.flow_style:
        end = node.end_mark.index - 1  # the closing brace
        return f"{text[:end].rstrip().rstrip(',')}, {key[0]}: {_flow(value)}{text[end:]}"
    # after the last value of the block, on a line of its own
    indent = " " * node.value[0][0].start_mark.column
    end = text.find("\n", _last_scalar(node).end_mark.index)
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{indent}{key[0]}: {_flow(value)}{text[end:]}"


def _flow(value: Any) -> str:
    """Return a value as one-line YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    return dump_plain({"x": value}).removeprefix("x: ").strip()
