"""Event files: what one writer leaves half done hurts no other's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from distlaunch.base import event_files
from distlaunch.base.event_files import EventWriter, read_event_sample, read_events
from distlaunch.base.events import EpochEnded, Notice, NumbersChecked


def test_half_a_line_does_not_swallow_the_next_writers_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventWriter(path, attempt=0, task="worker:0")
    for message in ("whole", "torn"):
        first.write(Notice(level="info", message=message))
    path.write_bytes(path.read_bytes()[:-9])
    EventWriter(path, attempt=0, task="launcher").write(Notice(level="info", message="next"))
    assert [event.message for event in read_events(path) if isinstance(event, Notice)] == ["whole", "next"]


def test_numbers_that_json_does_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    logs = {"loss": math.nan, "best": -math.inf, "worst": math.inf, "accuracy": 0.5}
    EventWriter(path, attempt=0, task="worker:0").write(EpochEnded(epoch=0, step=1, seconds=1.0, logs=logs))
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["logs"] == {"loss": "nan", "best": "-inf", "worst": "inf", "accuracy": 0.5}
    [event] = read_events(path)
    assert isinstance(event, EpochEnded)
    assert repr(event.logs) == repr(logs)


def test_numbers_that_json_does_not_have_in_any_field(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, attempt=0, task="worker:0")
    writer.write(EpochEnded(epoch=0, step=1, seconds=1.0, logs={}, learning_rate=math.nan))
    writer.write(NumbersChecked(status="differs", message="loss", deviation=math.inf))
    ended, checked = read_events(path)
    assert isinstance(ended, EpochEnded)
    assert isinstance(checked, NumbersChecked)
    assert math.isnan(ended.learning_rate or 0.0)
    assert checked.deviation == math.inf


def test_a_file_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without events would count as one that has never trained."""
    assert read_event_sample(tmp_path / "none") == []

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(event_files, "open_regular", refuse)
    with pytest.raises(PermissionError):
        read_event_sample(tmp_path / "events.jsonl")


def test_lines_of_other_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = {"event": "EpochEnded", "time": 1.0, "epoch": 0, "step": 1, "seconds": 1.0, "logs": {"loss": math.nan}}
    later = {**first, "format_version": 3, "step": 2, "unheard_of": 1, "logs": {"loss": "inf"}}
    unknown = {"event": "NobodyKnows", "format_version": 3}
    without_fields = {"event": "EpochEnded", "time": 1.0, "epoch": 0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, unknown, without_fields, later)))
    old, new = read_events(path)
    assert isinstance(old, EpochEnded)
    assert isinstance(new, EpochEnded)
    assert (old.format_version, new.format_version, new.step) == (1, 3, 2)
    assert math.isnan(old.logs["loss"])
    assert new.logs["loss"] == math.inf
