"""Who reads what, as `distlaunch plan --data` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlaunch.ui import words

_MOST_READERS = 8  # tasks that are shown; JSON has all


def data_lines(told: Mapping[str, Any]) -> list[str]:
    """From what `data/overview.py` tells."""
    lines = [f"data      {told['origin']}"]
    for name, split in told["splits"].items():
        lines += ["", *_split_lines(name, split, told)]
    return lines


def _split_lines(name: str, split: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    unknown = "examples of unknown number" if split["examples"] is None else words.count(split["examples"], "example")
    batches = "" if split["batches"] is None else f", {words.count(split['batches'], 'global batch')}"
    held = ""
    if split["buffer_examples"]:
        amount = f"{words.count(split['buffer_examples'], 'example')}, {words.size(split['buffer_bytes'])}"
        held = f", shuffled within a buffer of {amount} in each process"
    elif split["shuffled"] and split["by_number"]:
        held = ", shuffled over all of them anew in each epoch"
    whose = " of worker:0" if told["sharding"] == "function" and name == "train" else ""
    lines = [f"{name:<9} {unknown}{whose}{batches}{held}"]
    lines += [f"          {line}" for line in _reader_lines(name, split, told)]
    if split["work"]:
        lines.append(f"          {split['work']} of each example: in {_readers(told)} that needs its row")
    if told["readers"]:
        amount = f"{words.count(split['ahead_batches'], 'batch')}, {words.size(split['ahead_bytes'])}"
        lines.append(f"          read ahead: {amount} in each process")
    return lines


def _readers(told: Mapping[str, Any]) -> str:
    number = told["processes"]
    return f"{words.count(number, 'process')} of the task" if number else "the process"


def _reader_lines(name: str, split: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    readers = told["readers"]
    if not readers:
        return ["workers read whole batches, as the coordinator deals them out"]
    if told["streams"]:
        each = told["streams"] // len(readers)
        return [_streams_line(reader["task"], at * each, each) for at, reader in enumerate(readers)][:_MOST_READERS]
    if told["sharding"] == "function" and name == "train":
        return ["each worker reads what the data function gives it"]
    shown = {reader["task"] for reader in readers[:_MOST_READERS]}
    return [_rows_line(entry) for entry in split["first"] if entry["stop"] > entry["start"] and entry["task"] in shown]


def _streams_line(task: str, first: int, number: int) -> str:
    return f"{task} reads stream {first}" if number == 1 else f"{task} reads streams {first} to {first + number - 1}"


def _rows_line(entry: Mapping[str, Any]) -> str:
    rows, numbers = entry["stop"] - entry["start"], entry["numbers"]
    more = ", ..." if len(numbers) < rows else ""
    which = f": examples {', '.join(map(str, numbers))}{more}" if numbers else ""
    return f"batch {entry['batch']}, {entry['task']}: rows {entry['start'] + 1} to {entry['stop']}{which}"
