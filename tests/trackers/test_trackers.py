"""Real trackers, offline: a run that was continued is one run there, and has no value twice."""

from __future__ import annotations

import importlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.events import TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.tracking import tracking
from tests.recorded_run import START, done, ended, record
from tests.unit.test_tracking import make_job

pytestmark = pytest.mark.trackers
STEPS = [*range(1, 21), 23, 25, 30, 35, 40]
EPOCHS = [10, 20, 30, 40]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return make_job(tmp_path)


def track_twice(run: RunDir, name: Any, **variables: str) -> None:
    for attempt in (2, 3):
        said: list[str] = []
        with tracking(run, [name], {**os.environ, **variables}, said.append):
            pass
        assert said == []
        if attempt == 2:
            start = TrainingStarted(**START, first_epoch=3, first_step=30)
            record(run.events, 2, "worker:0", start, done(35, 2.0), done(40, 1.0), ended(3, 1.0))


def test_mlflow(run: RunDir) -> None:
    pytest.importorskip("mlflow")
    track_twice(run, "mlflow")
    with sqlite3.connect(run.path / "tracking" / "mlflow.db") as database:
        assert database.execute("select name from runs").fetchall() == [("job",)]
        rows = database.execute("select key, step, value from metrics").fetchall()
    assert sorted(step for key, step, _ in rows if key == "batch/loss") == STEPS
    assert sorted((step, value) for key, step, value in rows if key == "val_loss") == [
        (10, 16.0), (20, 12.0), (30, 6.0), (40, 2.0),
    ]  # fmt: skip


def read_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, in which a record may have several parts."""
    at, parts = 7, b""  # after the head of the file
    while at + 7 <= len(content):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb(run: RunDir) -> None:
    pytest.importorskip("wandb")
    track_twice(run, "wandb", WANDB_MODE="offline")
    files = sorted((run.path / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "one run, whose parts `wandb sync` joins"
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    seen: list[int] = []
    for file in files:
        for data in read_records(file.read_bytes()):
            record_: Any = records.Record()
            record_.ParseFromString(data)
            if record_.WhichOneof("record_type") == "history":
                seen.append(record_.history.step.num)
    assert seen == STEPS


def test_trackio(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    track_twice(run, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert Counter(step for _, step, _ in rows) == Counter(STEPS)


def test_tensorboard(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    track_twice(run, "tensorboard")
    loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = loader.EventAccumulator(str(run.path / "tensorboard" / "distlaunch"))
    found.Reload()
    assert [each.step for each in found.Scalars("batch/loss")] == STEPS
    assert [each.step for each in found.Scalars("val_loss")] == EPOCHS
