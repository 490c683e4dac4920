"""Tables: examples with named columns, of which some are features and one may be the label."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.data.files.base import as_objects
from distlaunch.data.files.listing import data_function_error
from distlaunch.data.structures import ArraySpec


@dataclass(frozen=True)
class Columns:
    """The columns that are read.

    Attributes:
        features: names of the columns in the dict of features.
        label: name of the label's column; None if an example is only the dict of features.
    """

    features: tuple[str, ...]
    label: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns in the order in which they are read."""
        return self.features if self.label is None else (*self.features, self.label)

    def arrange(self, raw: Sequence[Any]) -> Any:
        """Return the dict of features, or a pair of the dict and the label, given values in the order of `names`."""
        features = dict(zip(self.features, raw, strict=False))
        return features if self.label is None else (features, raw[-1])


def choose_columns(there: Iterable[str], columns: Sequence[str] | None, label: str | None, what: str) -> Columns:
    """Check the columns that a user has chosen, and return them; None means all.

    Args:
        there: names of the existing columns.
        what: name of the user's argument for the columns.

    Raises:
        ConfigError: a column does not exist or is named twice, or there is no column besides the label.
    """
    there = list(there)
    if isinstance(columns, str):
        raise data_function_error(f"{what}: got the text '{columns}'; expected a list of names: ['{columns}']")
    for argument, names in ((what, columns or ()), ("label", () if label is None else (label,))):
        for name in names:
            if name not in there:
                near = difflib.get_close_matches(str(name), there, 1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise data_function_error(f"{argument}: got '{name}'; expected one of {', '.join(there)}{hint}")
    wanted = there if columns is None else list(columns)
    if len(set(wanted)) != len(wanted):
        raise data_function_error(f"{what}: got a name more than once: {', '.join(wanted)}")
    features = tuple(name for name in wanted if name != label)
    if not features:
        raise data_function_error(
            f"{what}: there is no column besides the label '{label}'; the columns are {', '.join(there)}"
        )
    return Columns(features, label)


@dataclass(frozen=True)
class Kind:
    """The type of a column.

    Attributes:
        name: a type such as `int64`, `float32`, `bool` or `string`; or a reason, with spaces, why the column cannot be
            a tensor.
        shape: shape of one value.
        missing: whether some values are missing.
    """

    name: str
    shape: tuple[int, ...] = ()
    missing: bool = False

    def spec(self) -> ArraySpec:
        """Return the type of an array of this kind."""
        return ArraySpec(self.shape, self.name)

    def to_plain(self) -> list[Any]:
        """Return this kind as JSON types."""
        return [self.name, list(self.shape), self.missing]

    @staticmethod
    def from_plain(plain: Sequence[Any]) -> Kind:
        """Return a kind from the result of `to_plain`."""
        return Kind(plain[0], tuple(plain[1]), plain[2])


def kinds_from_facts(facts: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kind of each column from the facts of an index."""
    return {name: Kind.from_plain(plain) for name, plain in facts["columns"].items()}


class Table:
    """The base class of sources with named columns."""

    _columns: Columns
    decodes_with_tensorflow = False

    def _choose(
        self, kinds: Mapping[str, Kind], columns: Sequence[str] | None, label: str | None, what: str
    ) -> dict[str, Kind]:
        """Return the kinds of the columns that a user has chosen; see `choose_columns`.

        Raises:
            ConfigError: a column does not exist, or cannot be a tensor.
        """
        self._columns = choose_columns(kinds, columns, label, what)
        chosen = {name: kinds[name] for name in self._columns.names}
        for name, kind in chosen.items():
            if " " in kind.name:  # a reason, see `Kind`
                raise data_function_error(
                    f"{what}: '{name}' {kind.name}, which cannot be a tensor; choose other {what} with {what}=[...], "
                    "or rewrite the files"
                )
        return chosen

    def decode(self, *raw: Any) -> Any:
        """Return the dict of features, or a pair of the dict and the label."""
        return self._columns.arrange(raw)


def encode(texts: Iterable[str], encoding: str) -> np.ndarray:
    """Return the values as an array [n] of bytes."""
    return as_objects([text.encode(encoding) for text in texts])
