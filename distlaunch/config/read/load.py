"""Loads a config file, with overrides and environment variables, as a consistent RunConfig."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml import YAMLError

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.plain_types import is_dict
from distlaunch.base.secret_mask import SHORTEST, SecretMask, masked_arguments, secrets_of
from distlaunch.cluster.machine import Machine
from distlaunch.config.checks.config import cross_check
from distlaunch.config.dump import dump_config, dump_plain
from distlaunch.config.given_cluster import differing_sizes, joined_cluster
from distlaunch.config.read import overrides as override
from distlaunch.config.read.scalars import Unfilled
from distlaunch.config.read.schema_errors import problems_of
from distlaunch.config.read.text import folder_of, is_stream, read_text
from distlaunch.config.read.tree import Key, Node, TreeBuilder
from distlaunch.config.read.words import SHOWN, show
from distlaunch.config.read.yaml_nodes import parse
from distlaunch.config.references.argument_paths import with_given_arguments
from distlaunch.config.references.functions import reference_problems
from distlaunch.config.references.sites import STAND_IN, with_absolute_files
from distlaunch.config.run import RunConfig, as_run_name
from distlaunch.config.secrets import Secrets, secrets_in

CHECK = "DISTLAUNCH_CHECK"
"""Environment variable with the value of `train.check` for configs that have none."""

__all__ = [
    "LoadedConfig",
    "dump_config",
    "load_config",
    "load_mapping",
    "load_resolved",
    "load_stored",
    "parse_resolved",
]


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, and where each of its values was written."""

    config: RunConfig
    path: Path
    root: Node

    def source(self, key: Key) -> str | None:
        """Return where a key, or the nearest key around it, was written: `run.yaml:12` or `--set seed=3`."""
        return self.root.nearest(key).source

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Add lines to problems that were found later, such as by a worker."""
        return [
            problem if problem.source else problem._replace(source=_source_of(self.root, problem))
            for problem in problems
        ]


def load_config(
    path: Path | str,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    num_gpus: int | None = None,
    modules_folder: Path | None = None,
) -> LoadedConfig:
    """Read and check a config completely, without importing user code.

    Args:
        path: a YAML file; `-` for standard input. A pipe is read only once, even if the config is loaded again.
        overrides: `train.epochs=3` and the like.
        environ: values for `${NAME}`.
        num_gpus: number of GPUs of this machine; None if unknown, to skip the checks that depend on it.
        modules_folder: the folder that is searched for modules before the current directory.

    Raises:
        ConfigError: has all problems that were found.
    """
    path = Path(path)
    _check_folders(path)
    with _masking(overrides := tuple(overrides), environ):
        builder = TreeBuilder(str(path), environ)
        root = builder.build(parse(read_text(path), str(path)))
        return _checked(builder, root, path, overrides, environ, num_gpus, modules_folder)


def _check_folders(path: Path) -> None:
    """Raise ConfigError if the name of a folder cannot be written to the files of a run, which are UTF-8."""
    for folder, what in (
        (folder_of(path).absolute(), "the folder of the config"),
        (Path.cwd(), "the current directory"),
    ):
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            message = f"{what}, {str(folder)!a}, has a name that is not UTF-8; rename it, or start in another"
            raise ConfigError(Problem((), message, path.name)) from None


def load_mapping(
    config: Mapping[str, Any],
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    num_gpus: int | None = None,
) -> LoadedConfig:
    """Check a config made in Python. Relative paths start at the working directory.

    Raises:
        ConfigError: has all problems that were found.
    """
    builder = TreeBuilder("config", environ, numbered=False)
    try:
        # convert it to YAML, so that the same rules apply as to a config file
        text = dump_plain(config)
    except YAMLError as error:
        raise ConfigError(Problem((), f"a value that YAML cannot hold: {error.args[-1]!r}", "config")) from None
    with _masking(overrides := tuple(overrides), environ):
        root = builder.build(parse(text, "config"))
        return _checked(builder, root, Path("run"), overrides, environ, num_gpus)


@contextlib.contextmanager
def _masking(overrides: tuple[str, ...], environ: Mapping[str, str]) -> Generator[None]:
    """Mask secrets of overrides and variables in ConfigErrors that are raised in the block."""
    try:
        yield
    except ConfigError as error:
        shown = masked_arguments(overrides, environ)
        changed = {f"--set {before}": f"--set {after}" for before, after in zip(overrides, shown, strict=True)}
        values = [before.partition("=")[2] for before, after in zip(overrides, shown, strict=True) if before != after]
        raise ConfigError(_masked(error.problems, environ, values, changed)) from None


def _masked(
    problems: Iterable[Problem], environ: Mapping[str, str], values: Iterable[str], sources: Mapping[str, str]
) -> list[Problem]:
    values = {*values, *secrets_of(environ)}
    # messages show only the beginning of a long value
    mask = SecretMask(environ, [*values, *(value[:SHOWN] for value in values)])
    return [
        Problem(problem.key, mask.whole(problem.message), _masked_source(problem.source, sources, mask))
        for problem in problems
    ]


def _masked_source(source: str | None, sources: Mapping[str, str], mask: SecretMask) -> str | None:
    # only overrides may contain secrets, not names of files
    if source is None or not source.startswith("--"):
        return source
    return mask.whole(sources.get(source, source))


def _checked(
    builder: TreeBuilder,
    root: Node,
    path: Path,
    overrides: tuple[str, ...],
    environ: Mapping[str, str],
    num_gpus: int | None,
    modules_folder: Path | None = None,
) -> LoadedConfig:
    if not is_dict(root.value):
        message = f"got {show(root.plain())} at the top; expected `key: value` lines such as `model:` and `data:`"
        raise ConfigError(Problem((), message, root.source))
    early = builder.problems + override.apply(root, overrides, environ)
    override.texts_as_text(root)
    # set the name before validation, since it becomes a value of the config
    _set_default_name(root, path)
    _set_default_check(root, environ)
    data: Any = root.plain()
    config, wrong = _validate(data, root)
    wrong = [problem for problem in wrong if not _covered(problem, early)]
    # report all problems at once: check the valid parts further
    partial = config or _without_wrong_keys(data, [*early, *wrong])
    if partial is not None:
        # do this before references are checked, and before tasks with other working directories read the paths
        partial = with_absolute_files(partial, lambda key: _base_of(root, key, path))
        partial = with_given_arguments(partial, folder_of(path), lambda key: root.nearest(key).is_override)
        # skip checks that read one of these sections
        sections = frozenset(str(problem.key[0]) for problem in [*early, *wrong] if problem.key)
        wrong += cross_check(partial, num_gpus, sections, _given_sizes(partial, environ))
        partial = partial.with_modules_in(modules_folder)
        wrong += reference_problems(partial)
    problems = [*_unique(early), *sorted((_at(root, problem) for problem in wrong), key=_position)]
    if problems or partial is None:
        written = (each.value for each in secrets_in(root, environ).references.values())
        texts = [value for value in written if isinstance(value, str) and len(value) >= SHORTEST]
        raise ConfigError(_masked(problems, {}, [*Secrets.values(data), *texts], {}))
    config = partial.in_folder(Path(os.path.abspath(folder_of(path)))).with_secrets(secrets_in(root, environ))
    return LoadedConfig(config, path, root)


def _base_of(root: Node, key: Key, path: Path) -> Path:
    """Return the folder from which a path starts: the config's, or the current one for an override."""
    return Path() if root.nearest(key).is_override else folder_of(path)


def load_resolved(path: Path | str, environ: Mapping[str, str] | None = None) -> RunConfig:
    """Read the config of a run directory, as `dump_config` wrote it.

    Args:
        environ: values of the secrets to which the config refers; None to keep the references.

    Raises:
        ConfigError: the file was changed or is from another version, or a variable is not set.
    """
    return load_stored(path, environ).config


def load_stored(path: Path | str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Read the config of a run directory, with the lines of its values. See `load_resolved`."""
    return _parse_stored(read_text(Path(path)), str(path), environ)


def parse_resolved(text: str, name: str, environ: Mapping[str, str] | None = None) -> RunConfig:
    """Parse the text of a resolved config; errors name the file. See `load_resolved`."""
    return _parse_stored(text, name, environ).config


def _parse_stored(text: str, name: str, environ: Mapping[str, str] | None) -> LoadedConfig:
    # all variables in the file are secrets, since `dump_config` has escaped other texts that look like variables
    variables = Unfilled({}) if environ is None else environ
    builder = TreeBuilder(name, variables, unset="set it: a run keeps the values of secrets only until it is done")
    root = builder.build(parse(text, name))
    config, wrong = _validate(root.plain(), root)
    if builder.problems or config is None:
        raise ConfigError([*builder.problems, *(_at(root, problem) for problem in wrong)])
    config = config.with_secrets(secrets_in(root, {} if environ is None else environ, all_references=True))
    return LoadedConfig(config, Path(name), root)


def _validate(data: Any, root: Node | None = None) -> tuple[RunConfig | None, list[Problem]]:
    if not is_dict(data):
        return None, [Problem((), f"got {show(data)} at the top; expected a config")]
    try:
        return RunConfig.model_validate(data), []
    except ValidationError as error:
        return None, problems_of(error, data, root)


def _without_wrong_keys(data: dict[str, Any], problems: list[Problem]) -> RunConfig | None:
    """Return the config with defaults in place of wrong values, to check the rest; None if it is still invalid."""
    # remove the whole section of a strategy or engine, since its kind determines its keys
    keys = [
        problem.key[:1] if problem.key[0] in ("strategy", "engine") else problem.key
        for problem in problems
        if problem.key
    ]
    pruned: Any = dict(data)
    for key in keys:
        pruned = _pruned(pruned, key)
    # give required keys placeholders, which cause no problems
    pruned["model"] = {"function": STAND_IN} | _mapping(pruned.get("model"))
    pruned["data"] = {"global_batch": 1} | _mapping(pruned.get("data"))
    return _validate(pruned)[0]


def _given_sizes(config: RunConfig, environ: Mapping[str, str]) -> dict[str, int] | None:
    """Return the numbers of tasks that TF_CONFIG changes; None if the run joins no cluster of TF_CONFIG."""
    with contextlib.suppress(UsageError):  # the start of a run reports a malformed TF_CONFIG
        given = joined_cluster(config, Machine(environ))
        return differing_sizes(config, given[0]) if given is not None else None
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if is_dict(value) else {}


def _pruned(data: Any, key: Key) -> Any:
    """Return a copy without a key, or without the whole list around it, so that no index changes."""
    if not is_dict(data) or key[0] not in data:
        return data
    if len(key) == 1 or isinstance(key[1], int):
        return {name: value for name, value in data.items() if name != key[0]}
    return data | {key[0]: _pruned(data[key[0]], key[1:])}


def _set_default_name(root: Node, path: Path) -> None:
    """Set the name of the run to that of the config file, unless the config has a name or is a stream."""
    assert is_dict(root.value)
    if is_stream(path):
        return
    name = root.value.get("name")
    if name is None or name.value is None:
        root.value["name"] = Node(as_run_name(path.stem), str(path))


def _set_default_check(root: Node, environ: Mapping[str, str]) -> None:
    """Set `train.check` to the variable DISTLAUNCH_CHECK, unless the config has a value."""
    # not `in`: `Unfilled` has every variable
    value = environ[CHECK] if CHECK in list(environ) else ""
    assert is_dict(root.value)
    train = root.value.setdefault("train", Node({}, CHECK)) if value else None
    if train is not None and is_dict(train.value):
        train.value.setdefault("check", Node(value, CHECK))


def _covered(problem: Problem, early: list[Problem]) -> bool:
    """Return True if a value is wrong only because an earlier error has removed it."""
    return any(problem.key[: len(other.key)] == other.key for other in early if other.key)


def _unique(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _at(root: Node, problem: Problem) -> Problem:
    return Problem(problem.key, problem.message, _nearest_source(root, problem.key))


def _nearest_source(root: Node, key: Key) -> str:
    """Return the source of a key, or of what asks for it: the section around it, or an override of its `kind`."""
    node, kind = root.nearest(key), root.nearest(key).child("kind")
    is_missing = root.at(key) is None
    return kind.source if is_missing and kind is not None and kind.is_override else node.source


def _source_of(root: Node, problem: Problem) -> str:
    """Return the source of the value that causes a problem. It may be an override of a part of the problem's value.

    A message of Keras may name the argument: `compile.optimizer: SGD: Argument `learning_rate` should be float`.
    """
    node = root.at(problem.key)
    if node is None or node.is_override:
        return _nearest_source(root, problem.key)
    named = [(key, each) for key, each in node.walk() if any(_names(problem.message, part) for part in key)]
    overrides = [each.source for _, each in named if each.is_override]
    written = [each.source for key, each in named if "args" in (*problem.key[-1:], *key[:-1])]
    if overrides or written:
        return [*overrides, *written][0]
    # if the message names no argument, and only one argument was overridden, that argument is the cause
    inner = [(key, each.source) for key, each in node.walk() if each.is_override]
    arguments = {source for key, source in inner if "args" in (*problem.key[-1:], *key[:1])}
    return arguments.pop() if len(arguments) == 1 else node.source


def _names(message: str, part: str | int) -> bool:
    if not isinstance(part, str) or part in ("name", "args"):
        return False
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", message) is not None


def _position(problem: Problem) -> tuple[str, int]:
    name, _, line = (problem.source or "").rpartition(":")
    # sort lines by number
    return (name, int(line)) if line.isdigit() else (problem.source or "", 0)
