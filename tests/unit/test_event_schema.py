"""The JSON Schema of events fits what runs write, and docs/events.md lists all events."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from distlaunch.base.events import EpochEnded, Event
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from tests.recorded_run import make_run, record

ROOT = Path(__file__).parents[2]


def test_events_of_a_run_fit_the_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(CliRunner().invoke(cli, ["schema", "--events"]).output)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    run = make_run(RunDir(tmp_path / "job"))
    record(run.events, 1, "worker:0", EpochEnded(epoch=3, step=40, seconds=1.0, logs={"loss": float("nan")}))
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert len(lines) > 20
    for line in lines:
        validator.validate(line)
    for wrong in ({**lines[0], "event": "Nothing"}, {**lines[0], "time": "late"}, {"event": "TrainingStarted"}):
        assert not validator.is_valid(wrong)


def test_the_document_lists_all_events() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "write_event_docs.py"))["document"]()
    hint = "run: python scripts/write_event_docs.py > docs/events.md"
    assert (ROOT / "docs" / "events.md").read_text() == written, hint
    assert all(f"## {name}\n" in written for name in Event.kinds)
