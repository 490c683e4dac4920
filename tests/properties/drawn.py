"""Draws plain data, texts and whole configs; what a config holds is read from its models, so new keys are drawn too."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from distlaunch.base.errors import Problem
from distlaunch.config.base import Section
from distlaunch.config.checks.config import cross_check
from distlaunch.config.engines import AnyEngine, installed
from distlaunch.config.read.tree import Key
from distlaunch.config.references.functions import reference_problems
from distlaunch.config.references.sites import sites
from distlaunch.config.run import RunConfig

Draw = st.SearchStrategy[Any]

SPECIAL = (
    *("", " ", "~", "null", "true", "Yes", "off", "nan", ".nan", "-inf"),
    *("-.INF", "1e-3", "010", "0o17", "0x1F", "1_000"),
    *("12:30", "2020-01-01", "<<", "=", "?", "---", "...", "- a"),
    *("# no", "a: b", "!tag", "&a", "*a", "%d", "@", "`"),
    *("${HOME}", "$${HOME}", "${run_dir}", "$${run_dir}", "${run_dir}/${run_dir}"),
    *("${", "$", "a\nb", "a\r\nb", " a\n\n b "),
    *("\u2028", "\x85", "\ufeff", "\x01", "\t", "\x7f", "é", "日本"),
    *("👩‍🔬", "'", '"', "\\", "a" * 130, "a " * 70, "[", "{}"),
)  # fmt: skip
"""Texts that YAML, JSON or the config's own rules could take for something else."""

texts = st.sampled_from(SPECIAL) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12)
scalars = st.none() | st.booleans() | integers | st.floats() | texts
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | integers, inner, max_size=3),
    max_leaves=6,
)
"""What YAML can hold as an argument of a function."""

_FUNCTIONS = st.sampled_from(
    ["distlaunch.workloads.regression:build_model", "keras:Sequential", "math:floor", "nowhere:none", "é/my file.py:f"]
)


def configs() -> st.SearchStrategy[RunConfig]:
    """Configs whose values have the right types; they need not fit together."""
    return of_model(RunConfig).map(RunConfig.model_validate)


def fitting() -> st.SearchStrategy[RunConfig]:
    """Configs in which nothing is wrong: what does not fit is taken out of drawn ones."""
    return configs().map(lambda config: _mended(config.to_plain()))


def anything(*arguments: Any, **options: Any) -> None:
    """A function that a config may name in any place."""


ANYTHING = f"{__name__}:anything"


def _mended(data: dict[str, Any]) -> RunConfig:
    config = RunConfig.model_validate(data)
    for _ in range(20):
        problems = problems_of(config)
        if not problems:
            return config
        names = {site.key for site in sites(config)}
        for problem in problems:
            _mend(data, problem.key, names, config)
        config = RunConfig.model_validate(data)
    reject()


def _mend(data: dict[str, Any], key: Key, names: set[Key], config: RunConfig) -> None:
    if key == ("data",):
        data["data"]["function"] = ANYTHING
    elif key in names and (place := _inside(data, key[:-1])) is not None and place[key[-1]] != ANYTHING:
        place[key[-1]] = ANYTHING
    elif key == ("checkpoint",):
        data["checkpoint"] = {}
    elif key == ("data", "global_batch"):
        parts = config.strategy.num_parts(config.cluster, None) or config.cluster.num_workers
        if parts >= 2**63:  # a config file cannot hold it
            reject()
        data["data"].pop("streams", None)
        data["data"]["global_batch"] = parts
    elif key == ("train", "steps_per_epoch"):
        data["train"] = {**(data.get("train") or {}), "steps_per_epoch": 1}
    else:
        _take_out(data, key)


def problems_of(config: RunConfig) -> list[Problem]:
    """Return the problems of a config, without the places where they were written."""
    return [*cross_check(config, None), *reference_problems(config)]


def _inside(data: Any, key: Key) -> Any:
    """Return the value at a key, or None if it was removed because of another problem."""
    for part in key:
        if isinstance(data, dict) and part not in data:
            return None
        data = data[part]
    return data


def _take_out(data: dict[str, Any], key: Key) -> None:
    """Removes a key; a whole section of processes, and a whole list or mapping that something inside is wrong with."""
    section, *inner = key
    if inner and section not in ("strategy", "cluster") and isinstance(data.get(section), dict):
        data[section].pop(inner[0], None)
    else:
        data.pop(section, None)


def of_model(model: type[Section]) -> Draw:
    """The plain data of one section; a key that has a default may be missing."""
    drawn = {name: _of_field(field) for name, field in model.model_fields.items()}
    needed = {name: drawn[name] for name, field in model.model_fields.items() if field.is_required()}
    optional = {name: value for name, value in drawn.items() if name not in needed}
    return st.fixed_dictionaries(drawn) | st.fixed_dictionaries(needed, optional=optional)


def _of_field(field: FieldInfo) -> Draw:
    return _of(field.annotation, tuple(field.metadata))


def _of(annotation: Any, limits: tuple[Any, ...]) -> Draw:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _of(parts[0], (*limits, *_limits(parts[1:])))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(_of(part, limits) for part in parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is list:
        return st.lists(_of(parts[0], ()), max_size=3)
    if origin is dict:
        keys, values = (_of(part, ()) for part in parts)
        return st.dictionaries(keys, values, min_size=int(_limit(limits, "min_length") or 0), max_size=3)
    if annotation is AnyEngine:
        return st.one_of(*(of_model(model) for model in installed().models.values()))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return of_model(annotation)
    return _scalar(annotation, limits)


def _scalar(annotation: Any, limits: tuple[Any, ...]) -> Draw:
    if annotation is Any:
        return plain
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    low, high, above = (_limit(limits, name) for name in ("ge", "le", "gt"))
    if annotation is int:
        return integers.filter(lambda value: (low is None or value >= low) and (high is None or value <= high))
    if annotation is float:
        finite = _limit(limits, "allow_inf_nan") is False
        low = above if low is None else low
        return st.floats(
            low, high, exclude_min=above is not None, allow_nan=False if finite else None,
            allow_infinity=False if finite else None,
        )  # fmt: skip
    assert annotation is str, f"a type that no test draws yet: {annotation}"
    pattern = _limit(limits, "pattern")
    if pattern is None:
        return texts
    # Rust's \w, which pydantic uses, is not Python's for every character
    fits = TypeAdapter(Annotated[str, *limits])
    return (_FUNCTIONS | st.from_regex(pattern, fullmatch=True)).filter(lambda text: _is_valid(fits, text))


def _is_valid(adapter: TypeAdapter[Any], text: str) -> bool:
    try:
        adapter.validate_python(text)
    except ValidationError:
        return False
    return "\0" not in text


def _limits(metadata: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(limit for each in metadata for limit in (each.metadata if isinstance(each, FieldInfo) else (each,)))


def _limit(limits: Iterable[Any], name: str) -> Any:
    return next((value for limit in limits if (value := getattr(limit, name, None)) is not None), None)
