"""The output of `distlaunch plan --data`: which task reads which examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlaunch.base.plural import count
from distlaunch.ui import words

_MAX_READERS = 8  # tasks that are shown; the JSON form has all


def data_lines(overview: Mapping[str, Any]) -> list[str]:
    """Return the lines for the result of `data/overview.py`."""
    lines = [f"data      {overview['origin']}"]
    for name, split in overview["splits"].items():
        lines += ["", *_split_lines(name, split, overview)]
    return lines


def _split_lines(name: str, split: Mapping[str, Any], overview: Mapping[str, Any]) -> list[str]:
    unknown = "examples of unknown number" if split["examples"] is None else count(split["examples"], "example")
    batches = "" if split["batches"] is None else f", {count(split['batches'], 'global batch')}"
    shuffled = ""
    if split["buffer_examples"]:
        amount = f"{count(split['buffer_examples'], 'example')}, {words.size(split['buffer_bytes'])}"
        shuffled = f", shuffled within a buffer of {amount} in each process"
    elif split["shuffled"] and split["by_number"]:
        shuffled = ", all of them shuffled again in each epoch"
    whose = " of worker:0" if overview["sharding"] == "function" and name == "train" else ""
    lines = [f"{name:<9} {unknown}{whose}{batches}{shuffled}"]
    lines += [f"          {line}" for line in _reader_lines(name, split, overview)]
    if split["work"]:
        lines.append(f"          {split['work']} of each example: in {_readers(overview)} that needs the example")
    if overview["readers"]:
        amount = f"{count(split['ahead_batches'], 'batch')}, {words.size(split['ahead_bytes'])}"
        lines.append(f"          read ahead: {amount} in each process")
    return lines


def _readers(overview: Mapping[str, Any]) -> str:
    number = overview["processes"]
    return f"{count(number, 'process')} of the task" if number else "the process"


def _reader_lines(name: str, split: Mapping[str, Any], overview: Mapping[str, Any]) -> list[str]:
    readers = overview["readers"]
    if not readers:
        return ["workers read whole batches, which the coordinator assigns to them"]
    if overview["streams"]:
        each = overview["streams"] // len(readers)
        return [_streams_line(reader["task"], at * each, each) for at, reader in enumerate(readers)][:_MAX_READERS]
    if overview["sharding"] == "function" and name == "train":
        return ["each worker reads the data that its data function returns"]
    shown = {reader["task"] for reader in readers[:_MAX_READERS]}
    return [_rows_line(entry) for entry in split["first"] if entry["stop"] > entry["start"] and entry["task"] in shown]


def _streams_line(task: str, first: int, number: int) -> str:
    return f"{task} reads stream {first}" if number == 1 else f"{task} reads streams {first} to {first + number - 1}"


def _rows_line(entry: Mapping[str, Any]) -> str:
    rows, numbers = entry["stop"] - entry["start"], entry["numbers"]
    more = ", ..." if len(numbers) < rows else ""
    which = f": examples {', '.join(map(str, numbers))}{more}" if numbers else ""
    return f"batch {entry['batch']}, {entry['task']}: rows {entry['start'] + 1} to {entry['stop']}{which}"
