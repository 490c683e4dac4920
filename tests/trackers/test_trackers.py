"""Real trackers, offline: a run that was continued is one run there, has no value twice, and has its own weights."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.event_files import read_events
from distlaunch.base.events import StepsDone, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.jobs.tracking import tracking
from tests.processes.supervised import processes_of, wait_until
from tests.recorded_run import START, done, ended, record
from tests.unit.test_tracking import make_job

pytestmark = pytest.mark.trackers
STEPS = [*range(1, 21), 23, 25, 30, 35, 40]
EPOCHS = [10, 20, 30, 40]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    # on a busy machine, processes of the lowest priority hardly run
    monkeypatch.setattr("distlaunch.jobs.tracking._DEADLINE_S", 600.0)
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


Points = list[tuple[str, int]]
"""Names of values with their steps, as a tracker has them."""


def in_mlflow(folder: Path) -> tuple[int, Points]:
    """The number of runs in a tracker, and the points."""
    with sqlite3.connect(folder / "tracking" / "mlflow.db") as database:
        runs = database.execute("select name from runs").fetchall()
        return len(runs), database.execute("select key, step from metrics").fetchall()


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


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows: list[dict[str, float]] = []
    for file in sorted((folder / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in read_records(file.read_bytes()):
            record_: Any = records.Record()
            record_.ParseFromString(data)
            if record_.WhichOneof("record_type") == "history":
                items = record_.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def in_wandb(folder: Path) -> tuple[int, Points]:
    rows = wandb_rows(folder)
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers)), "the server ignores other rows"
    points = [(name, int(row["step"])) for row in rows for name in row if not name.startswith("_")]
    # `wandb sync` joins the parts of a run, whose files have the same name
    return len({file.name for file in folder.glob("tracking/wandb/offline-run-*/run-*.wandb")}), points


def in_trackio(folder: Path) -> tuple[int, Points]:
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    return len({name for name, _, _ in rows}), [(name, step) for _, step, text in rows for name in json.loads(text)]


def read_tensorboard(folder: Path) -> Any:
    loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    return loader.EventAccumulator(str(folder / "tensorboard" / "distlaunch")).Reload()


def in_tensorboard(folder: Path) -> tuple[int, Points]:
    found = read_tensorboard(folder)
    return 1, [(name, each.step) for name in found.Tags()["scalars"] for each in found.Scalars(name)]


READERS: dict[str, Callable[[Path], tuple[int, Points]]] = {
    "mlflow": in_mlflow, "wandb": in_wandb, "trackio": in_trackio, "tensorboard": in_tensorboard,
}  # fmt: skip


def steps(points: Points, name: str) -> list[int]:
    return sorted(step for key, step in points if key == name)


def variables(folder: Path) -> dict[str, str]:
    return {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}


@pytest.mark.parametrize("name", READERS)
def test_a_run_of_several_attempts(name: Any, run: RunDir) -> None:
    pytest.importorskip(name)
    track_twice(run, name, **variables(run.path))
    runs, points = READERS[name](run.path)
    assert runs == 1
    assert steps(points, "batch/loss") == STEPS
    assert steps(points, "val_loss") == EPOCHS


@pytest.mark.parametrize("name", READERS)
def test_the_end_of_an_epoch_that_only_the_next_attempt_reached(name: Any, run: RunDir) -> None:
    """The first attempt was killed in the validation after step 10."""
    pytest.importorskip(name)
    run.events.unlink()
    attempts = [
        (TrainingStarted(**START, first_epoch=0, first_step=0), *(done(step, 1.0) for step in (3, 6, 10))),
        (TrainingStarted(**START, first_epoch=0, first_step=4), done(6, 1.0), done(10, 1.0), ended(0, 8.0)),
    ]
    for attempt, events in enumerate(attempts):
        record(run.events, attempt, "worker:0", *events)
        with tracking(run, [name], {**os.environ, **variables(run.path)}, pytest.fail):
            pass
    runs, points = READERS[name](run.path)
    assert (runs, steps(points, "batch/loss"), steps(points, "val_loss")) == (1, [3, 6, 10], [10])


@pytest.mark.parametrize("name", READERS)
def test_unusual_names(name: Any, run: RunDir) -> None:
    """Names of metrics have any characters, and so have keys of layouts, which are patterns of paths."""
    pytest.importorskip(name)
    layout = '{"(query|key|value)/kernel": [model], ".*bias": [model], ".+bias": [model]}'
    run.config.write_text(f"strategy: {{kind: jax, layout: {layout}}}", encoding="utf-8")
    unusual = ["recall@10", "acc(%)", "acc[%]", "/kernel/", "größe", "x" * 300]
    record(run.events, 1, "worker:0", ended(5, 1.0, **dict.fromkeys(unusual, 0.5)))
    with tracking(run, [name], {**os.environ, **variables(run.path)}, pytest.fail):
        pass
    _, points = READERS[name](run.path)
    names = {key for key, step in points if step == 60}
    assert len(names - {"step"}) == len({"epoch", "loss", "val_loss", *unusual}), names


def test_values_are_exact(run: RunDir) -> None:
    pytest.importorskip("mlflow")
    track_twice(run, "mlflow")
    with sqlite3.connect(run.path / "tracking" / "mlflow.db") as database:
        rows = database.execute("select step, value from metrics where key = 'val_loss'").fetchall()
    assert sorted(rows) == [(10, 16.0), (20, 12.0), (30, 6.0), (40, 2.0)]


def times_in_mlflow(folder: Path) -> list[float]:
    with sqlite3.connect(folder / "tracking" / "mlflow.db") as database:
        return [each / 1000 for (each,) in database.execute("select timestamp from metrics where key = 'val_loss'")]


TIMES: dict[str, Callable[[Path], list[float]]] = {
    "mlflow": times_in_mlflow,
    "wandb": lambda folder: [row["_timestamp"] for row in wandb_rows(folder) if "val_loss" in row],
    "tensorboard": lambda folder: [each.wall_time for each in read_tensorboard(folder).Scalars("val_loss")],
}


@pytest.mark.parametrize("name", TIMES)
def test_values_sent_later_have_the_times_of_their_events(name: Any, run: RunDir) -> None:
    """An event per second, long ago."""
    pytest.importorskip(name)
    events = [json.loads(line) for line in run.events.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(event | {"time": 1.6e9 + number}) for number, event in enumerate(events)]
    run.events.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with tracking(run, [name], {**os.environ, **variables(run.path)}, pytest.fail):
        pass
    epochs = [1.6e9 + number for number, event in enumerate(events) if event["event"] == "EpochEnded"]
    assert sorted(TIMES[name](run.path)) == epochs
    if name == "mlflow":
        with sqlite3.connect(run.path / "tracking" / "mlflow.db") as database:
            (span,) = database.execute("select start_time, end_time from runs").fetchall()
        assert span == (1.6e12, 1.6e12 + 1000 * (len(events) - 1))


JOB = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 8}
compile: {optimizer: adam, loss: mse}
train: {epochs: 3, steps_per_call: 1, log_every_steps: 1}
checkpoint: {every_steps: 10}
determinism: true
"""
MODEL = """
import time
import keras, numpy as np

def model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

def data():
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    return {"train": (x, x.sum(1, keepdims=True)), "validation": (x[:40], x[:40].sum(1, keepdims=True))}

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
"""
SLOW = ("--set", "train.callbacks=[{name: 'mine.py:Slow'}]")


def launch(folder: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "distlaunch", "train", *words], cwd=folder, env={**os.environ, **environ}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def weights_of(run: RunDir) -> dict[str, Any]:
    saved = CheckpointStore(run.checkpoints).newest_good()
    assert saved is not None
    assert max(run.checkpoint_steps()) == 120
    return saved.state


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "mine.yaml").write_text(JOB)
    plain = launch(tmp_path, "mine.yaml", "--name", "plain")
    assert plain.wait(300) == 0, plain.stdout
    return tmp_path


def assert_same_weights(project: Path) -> None:
    expected, found = (weights_of(RunDir(project / "runs" / name)) for name in ("plain", "job"))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_a_killed_and_resumed_job_is_one_run_in_each_tracker(project: Path) -> None:
    names = [name for name in READERS if importlib.util.find_spec(name)]
    folder = project / "runs" / "job"
    trackers = f"tracking=[{', '.join(names)}]"
    launched = launch(project, "mine.yaml", *SLOW, "--set", trackers, **variables(folder))
    wait_until(lambda: any(isinstance(event, StepsDone) and event.step > 55 for event in
                           read_events(folder / "events.jsonl")), timeout_s=120)  # fmt: skip
    launched.kill()
    launched.wait(60)
    # the processes that send end by themselves
    wait_until(lambda: not processes_of(folder), timeout_s=60)
    again = launch(project, "runs/job", "--resume", "--set", "train.callbacks=[]", **variables(folder))
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0, out
    assert "tracking:" not in out
    assert_same_weights(project)
    for name in names:
        runs, points = READERS[name](folder)
        assert (name, runs) == (name, 1)
        assert (name, steps(points, "val_loss")) == (name, [40, 80, 120])
        seen = steps(points, "batch/loss")
        assert len(seen) == len(set(seen)) > 60, name
        assert seen[-1] == 120


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_tracker_without_a_place_does_not_touch_the_run(name: str, project: Path) -> None:
    """The server is gone, or the folder cannot be written."""
    pytest.importorskip(name)
    (project / "a file").write_text("")
    gone = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "TRACKIO_DIR": str(project / "a file" / "trackio")}  # fmt: skip
    launched = launch(project, "mine.yaml", "--set", f"tracking=[{name}]", **gone)
    out, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, out
    assert f"tracking: {name} " in out
    assert f"`distlaunch track runs/job {name}` sends the rest" in out
    assert_same_weights(project)
    sent = subprocess.run(
        [sys.executable, "-m", "distlaunch", "track", "runs/job", name], cwd=project, capture_output=True, text=True,
        env={**os.environ, **variables(project / "runs" / "job")}, timeout=300,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    runs, points = READERS[name](project / "runs" / "job")
    assert (runs, steps(points, "val_loss")) == (1, [40, 80, 120])
