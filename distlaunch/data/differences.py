"""Describes differences between the data of processes.

Processes in lockstep must reach the end of their data together, because a process that continued alone would wait
forever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlaunch.base.errors import DataError
from distlaunch.base.plural import count

REASONS = (
    "all processes must read the same examples in the same order, and distlaunch selects the rows of each; the usual "
    "reasons are .shard() in the data function (write `data.sharding: function` to use it), random choices without a "
    "seed, and files that are added or changed meanwhile"
)


def kind_of(source: str) -> str:
    """Return `training` or `validation`, by the name of a `Source`."""
    return "validation" if source.startswith("validation") else "training"


def check_ends(ended: Sequence[bool], names: Sequence[str], steps: int, kind: str) -> None:
    """Raise DataError if the data of some processes, but not of all, has ended.

    Args:
        ended: for each process, whether its data has ended.
        names: names of the processes.
        steps: number of global batches read so far in this pass.
        kind: kind of data, such as `training`.
    """
    # at the usual end of an epoch, all have ended
    if all(ended) or not any(ended):
        return
    first = ", ".join(name for name, end in zip(names, ended, strict=True) if end)
    others = ", ".join(name for name, end in zip(names, ended, strict=True) if not end)
    after = f"it ended after {_batches(steps)} in {first}, but not in {others}"
    raise DataError(f"data: the processes read {kind} data of different lengths: {after}; {REASONS}")


@dataclass(frozen=True)
class FirstPass:
    """Length of the data of a process, as far as the process has read it.

    Attributes:
        length: number of global batches in a pass; None until the process has reached the end of its first pass.
        read: number of batches read so far before the end.
    """

    length: int | None = None
    read: int = 0


def check_passes(seen: Mapping[str, FirstPass], kind: str) -> None:
    """Raise DataError if the data of the processes ends after different numbers of batches.

    Args:
        seen: for each process, how far it has read its first pass, even if it is in a later pass by now.
        kind: kind of data, such as `training`.
    """
    lengths = {name: one.length for name, one in seen.items() if one.length is not None}
    if not lengths:
        return
    shortest = min(lengths.values())
    longer = [
        f"{name} ({'at least ' if one.length is None else ''}{one.read if one.length is None else one.length:,})"
        for name, one in seen.items()
        if (one.read if one.length is None else one.length) > shortest
    ]
    if longer:
        first = ", ".join(name for name, length in lengths.items() if length == shortest)
        after = f"it ended after {_batches(shortest)} in {first}, but not in {', '.join(longer)}"
        raise DataError(f"data: the processes read {kind} data of different lengths: {after}; {REASONS}")


def _batches(number: int) -> str:
    return count(number, "global batch")


OF_FUNCTION = (
    "with `data.sharding: function`, your function divides the training data only; the validation data must be the "
    "same in every worker, and distlaunch selects the rows of each"
)


def different_lengths(lengths: Mapping[str, str], reasons: str = REASONS) -> str:
    """Return how the lengths of the data differ between processes, or an empty string.

    Args:
        lengths: length by process, such as `900 examples for training`.
    """
    if len(set(lengths.values())) == 1:
        return ""
    known = "; ".join(f"{name} has {length}" for name, length in lengths.items())
    return f"the processes read data of different lengths: {known}; {reasons}"


def describe_duplicates(by_process: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a message if two processes or streams begin with the same examples, or an empty string.

    Examples of different types also give a message.

    Args:
        by_process: description of the data of each process, see `fingerprint`. With streams, each description has
            `parts`: the hashes of examples by stream.
    """
    first = next(iter(by_process))
    for name, facts in by_process.items():
        if facts["types"] != by_process[first]["types"]:
            return f"the examples differ in type: {by_process[first]['types']} in {first}, {facts['types']} in {name}"
    parts = [part for name, facts in by_process.items() for part in _parts(name, facts).items()]
    seen: dict[tuple[str, ...], str] = {}
    for name, hashes in parts:
        # examples that are all equal, as in tests, do not show whether parts are the same
        if len(set(hashes)) > 1 and (other := seen.setdefault(tuple(hashes), name)) != name:
            return f"{other} and {name} got the same examples; the data function must return the part for its `context`"
    return ""


def _parts(name: str, facts: Mapping[str, Any]) -> dict[str, list[str]]:
    return facts["parts"] if "parts" in facts else {name: list(facts["examples"].values())}


def different_data(by_process: Mapping[str, Mapping[str, str]], reasons: str = REASONS) -> str:
    """Return how the data differs between processes, or an empty string.

    Args:
        by_process: description of the data by process and split, see `fingerprint`.
    """
    names = list(by_process)
    for split in by_process[names[0]]:
        seen = {name: json.loads(by_process[name].get(split, "{}")) for name in names}
        if difference := first_difference(seen):
            return f"the processes read different data for {split}: {difference}; {reasons}"
    return ""


def first_difference(seen: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the first fact in which a process differs from the first process, or return an empty string."""
    first, *others = seen
    # `fingerprint` puts types before examples, because different types cause different hashes
    for fact in seen[first]:
        for other in others:
            here, there = seen[first][fact], seen[other].get(fact)
            if here == there:
                continue
            if fact == "parts":  # only the streams that both descriptions contain are compared
                both = [name for name in here if here[name] != (there or here).get(name, here[name])]
                if not both:
                    continue
                return f"the first examples of {both[0]} are not the same in {first} and in {other}"
            if fact != "examples":
                return f"{fact} in {first}: {here}; in {other}: {there}"
            number = next(number for number in here if here[number] != (there or {}).get(number))
            return f"example {number} is not the same in {first} and in {other}"
    return ""
