"""The processes of a run compare their data before the first step.

Processes that see different data would train on some examples twice and on others never, or run out of data at
different steps, and wait for each other forever.
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
    different_data,
    different_lengths,
    first_difference,
    not_own_data,
)
from distlaunch.data.running_fingerprint import RunningFingerprint
from distlaunch.data.split import Split


class Peers(Protocol):
    """The processes of the run, as a comparison of their data needs them."""

    @property
    def is_chief(self) -> bool: ...

    def gather(self, message: str) -> Mapping[str, str]:
        """Return the message of each process by its name; every process must call it."""
        ...


def compare_data(
    config: RunConfig, peers: Peers, train: Split, validation: Split | None, emit: Callable[[Event], None]
) -> tuple[Split, Split | None]:
    """Return the splits if all processes see the same data; process-local splits get the agreed length.

    Raises:
        ConfigError: the processes see different data, or the same where each should have its own.
    """
    splits = {"training": train, "validation": validation}
    read = {name: split for name, split in splits.items() if split is not None}
    # every process gets everything and so raises the same error: none is left waiting for the others
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
        wrong = wrong or _lacking(name, seen) or _not_own(name, seen)
    if wrong:
        raise ConfigError(Problem(("data",), wrong))
    if config.data.sharding == "function" and config.cluster.num_workers > 1:
        if peers.is_chief:
            message = "each worker trains on its own examples, so the numbers are not those of one device"
            emit(Notice(level="info", message=f"data.sharding: function: {message}"))
        if config.strategy.has_coordinator:
            # the coordinator reads none of the workers' data, so what it knows of its own says nothing
            train = train.of_others()
    if train.is_process_local:
        train = _agreed(train, "training", seen)
    if validation is not None and validation.is_process_local:
        validation = _agreed(validation, "validation", seen)
    if len(seen) > 1 and train.has_glimpse and not (train.is_process_local or config.strategy.has_coordinator):
        train = train.with_running(RunningFingerprint(peers.gather))
    return train, validation


def describe_data(config: RunConfig, train: Split, validation: Split | None) -> dict[str, str]:
    """Return a description of the splits by the chief, for `what_changed` in a later attempt."""
    descriptions = {}
    for name, split in {"train": train, "validation": validation}.items():
        if split is not None:
            # of data that workers divide, which part the chief has depends on their number
            workers = (
                {"workers": config.cluster.num_workers}
                if split.is_process_local and config.data.streams is None
                else {}
            )
            descriptions[name] = json.dumps({**workers, **json.loads(split.describe())})
    return descriptions


def what_changed(events: Iterable[Event], now: DataResolved) -> str:
    """Return how the data differ from those of the previous attempt, or an empty string."""
    before = next((event for event in reversed([*events]) if isinstance(event, DataResolved)), None)
    if before is None:
        return ""
    for name in before.seen:
        if name not in now.seen:
            continue
        lengths = before.examples.get(name), now.examples.get(name)
        descriptions = {"the attempt before": json.loads(before.seen[name]), "this one": json.loads(now.seen[name])}
        workers = [facts.pop("workers", None) for facts in descriptions.values()]
        if workers[0] != workers[1]:
            how_many = f"{workers[1]} workers divide the training data, {workers[0]} did in the attempt before"
            return f"data: {how_many}, so the batches of an epoch are different"
        difference = first_difference(descriptions)
        if None not in lengths and lengths[0] != lengths[1]:
            difference = f"{lengths[0]:,} examples in the attempt before, {lengths[1]:,} in this one"
        if difference:
            what = {"train": "training"}.get(name, name)
            return f"data: the {what} data have changed since the attempt before: {difference}"
    return ""


def _missing(seen: Mapping[str, Mapping[str, Any]], reasons: str) -> str:
    for name in sorted({name for facts in seen.values() for name in facts}):
        if lacking := _lacking(name, seen):
            return f"{lacking}, the others did; {reasons}"
    return ""


def _lacking(name: str, seen: Mapping[str, Mapping[str, Any]]) -> str:
    lacking = [task for task, facts in seen.items() if name not in facts]
    return f"{', '.join(lacking)} got no data for {name}" if lacking else ""


def _facts(split: Split) -> dict[str, Any]:
    length, data = _length_of(split), split.describe()
    return {"length": length, "batches": split.num_batches, "examples": split.num_examples, "data": data}


def _length_of(split: Split) -> str:
    if split.num_examples is not None:
        return f"{split.num_examples:,} examples"
    return "examples of unknown number" if split.num_batches is None else f"{split.num_batches:,} global batches"


def _not_own(name: str, seen: Mapping[str, Any]) -> str:
    wrong = not_own_data({task: json.loads(facts[name]["data"]) for task, facts in seen.items()})
    return f"{name}: {wrong}" if wrong else ""


def _agreed(split: Split, name: str, seen: Mapping[str, Any]) -> Split:
    """Return a process-local split with the length of the longest pass, or None if one is unknown."""
    batches, examples = ([facts[name][what] for facts in seen.values()] for what in ("batches", "examples"))
    return split.with_length(None if None in batches else max(batches), None if None in examples else sum(examples))
