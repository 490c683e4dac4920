"""Compares the data of a run's processes before the first step.

Processes with different data would train on some examples twice and on others never. Processes whose data ends at
different steps would wait for each other forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.events import DataResolved, Event, Notice
from distlaunch.config.run import RunConfig
from distlaunch.data.differences import (
    OF_FUNCTION,
    REASONS,
    describe_duplicates,
    different_data,
    different_lengths,
    first_difference,
)
from distlaunch.data.running_fingerprint import RunningFingerprint
from distlaunch.data.split import Split


class Peers(Protocol):
    """The part of a strategy that a comparison needs."""

    @property
    def is_chief(self) -> bool: ...

    def gather(self, message: str) -> Mapping[str, str]:
        """Return the message of each process by its name; every process must call it."""
        ...


def compare_data(
    config: RunConfig, peers: Peers, train: Split, validation: Split | None, emit: Callable[[Event], None]
) -> tuple[Split, Split | None]:
    """Check that all processes read the right data, and return the splits.

    Process-local splits get the length that the processes agree on.

    Raises:
        ConfigError: the processes read different data, or the same data although each should read its own.
    """
    splits = {"training": train, "validation": validation}
    read = {name: split for name, split in splits.items() if split is not None}
    # every process gets all descriptions, so all raise the same error and none waits for the others
    gathered = peers.gather(json.dumps({name: _facts(split) for name, split in read.items()}))
    seen = {task: json.loads(text) for task, text in gathered.items()}
    names = {name for facts in seen.values() for name in facts}
    own = {name for name, split in read.items() if split.is_process_local or config.data.streams is not None}
    shared = {task: {name: facts[name] for name in facts if name not in own} for task, facts in seen.items()}
    reasons = OF_FUNCTION if config.data.sharding == "function" else REASONS
    lengths = {
        task: " and ".join(f"{fact['length']} for {name}" for name, fact in facts.items())
        for task, facts in shared.items()
    }
    wrong = _missing(shared, reasons) or different_lengths(lengths, reasons)
    data = {task: {name: facts[name]["data"] for name in facts} for task, facts in shared.items()}
    wrong = wrong or different_data(data, reasons)
    for name in sorted(names & own):
        wrong = wrong or _processes_without(name, seen) or _describe_duplicates(name, seen)
    if wrong:
        raise ConfigError(Problem(("data",), wrong))
    if config.data.sharding == "function" and config.cluster.num_workers > 1:
        if peers.is_chief:
            message = "each worker trains on its own examples, so the numbers differ from those of one device"
            emit(Notice(level="info", message=f"data.sharding: function: {message}"))
        if config.strategy.has_coordinator:
            # the coordinator does not read the workers' data, so its own split has the wrong length
            train = train.for_coordinator()
    if train.is_process_local:
        train = _with_agreed_length(train, "training", seen)
    if validation is not None and validation.is_process_local:
        validation = _with_agreed_length(validation, "validation", seen)
    if len(seen) > 1 and train.can_compare_rows and not (train.is_process_local or config.strategy.has_coordinator):
        train = train.with_running_fingerprint(RunningFingerprint(peers.gather))
    return train, validation


def describe_data(config: RunConfig, train: Split, validation: Split | None) -> dict[str, str]:
    """Return the chief's description of the splits, for `what_changed` in a later attempt."""
    descriptions = {}
    for name, split in {"train": train, "validation": validation}.items():
        if split is not None:
            # if the workers divide the data, the chief's part depends on the number of workers
            workers = (
                {"workers": config.cluster.num_workers}
                if split.is_process_local and config.data.streams is None
                else {}
            )
            descriptions[name] = json.dumps({**workers, **json.loads(split.describe())})
    return descriptions


def what_changed(events: Iterable[Event], now: DataResolved) -> str:
    """Return how the data differs from that of the previous attempt, or an empty string."""
    before = next((event for event in reversed([*events]) if isinstance(event, DataResolved)), None)
    if before is None:
        return ""
    for name in before.seen:
        if name not in now.seen:
            continue
        lengths = before.examples.get(name), now.examples.get(name)
        descriptions = {"the last attempt": json.loads(before.seen[name]), "this one": json.loads(now.seen[name])}
        workers = [facts.pop("workers", None) for facts in descriptions.values()]
        if workers[0] != workers[1]:
            how_many = f"{workers[1]} workers divide the training data, instead of {workers[0]} in the last attempt"
            return f"data: {how_many}, so the batches of an epoch are different"
        difference = first_difference(descriptions)
        if None not in lengths and lengths[0] != lengths[1]:
            difference = f"{lengths[0]:,} examples in the last attempt, {lengths[1]:,} in this one"
        if difference:
            what = {"train": "training"}.get(name, name)
            return f"data: the {what} data has changed since the last attempt: {difference}"
    return ""


def _missing(seen: Mapping[str, Mapping[str, Any]], reasons: str) -> str:
    for name in sorted({name for facts in seen.values() for name in facts}):
        if without := _processes_without(name, seen):
            return f"{without}, but the others did; {reasons}"
    return ""


def _processes_without(name: str, seen: Mapping[str, Mapping[str, Any]]) -> str:
    without = [task for task, facts in seen.items() if name not in facts]
    return f"{', '.join(without)} got no data for {name}" if without else ""


def _facts(split: Split) -> dict[str, Any]:
    length, data = _length_of(split), split.describe()
    return {"length": length, "batches": split.num_batches, "examples": split.num_examples, "data": data}


def _length_of(split: Split) -> str:
    if split.num_examples is not None:
        return f"{split.num_examples:,} examples"
    return "examples of unknown number" if split.num_batches is None else f"{split.num_batches:,} global batches"


def _describe_duplicates(name: str, seen: Mapping[str, Any]) -> str:
    wrong = describe_duplicates({task: json.loads(facts[name]["data"]) for task, facts in seen.items()})
    return f"{name}: {wrong}" if wrong else ""


def _with_agreed_length(split: Split, name: str, seen: Mapping[str, Any]) -> Split:
    """Return a process-local split whose length all processes agree on.

    Its number of batches is that of the longest pass, and its number of examples is the sum over all processes. Each
    number is None if any process does not know it.
    """
    batches, examples = ([facts[name][what] for facts in seen.values()] for what in ("batches", "examples"))
    return split.with_length(None if None in batches else max(batches), None if None in examples else sum(examples))
