"""Event files: what one writer leaves half done hurts no other's."""

from __future__ import annotations

from pathlib import Path

from distlaunch.events import EventWriter, Notice, read_events


def test_half_a_line_does_not_swallow_the_next_writers_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventWriter(path, attempt=0, task="worker:0")
    for message in ("whole", "torn"):
        first.write(Notice(level="info", message=message))
    path.write_bytes(path.read_bytes()[:-9])
    EventWriter(path, attempt=0, task="launcher").write(Notice(level="info", message="next"))
    assert [event.message for event in read_events(path) if isinstance(event, Notice)] == ["whole", "next"]
