"""Going on with a run: what was trained is kept, and what keeps a run from going on is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real import json_lines, run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointFailed, EpochEnded, Restored, TrainingStarted
from distlaunch.base.run_dir import RunDir

MINE = """
import keras, numpy as np


def model(units=16):
    layers = keras.layers
    return keras.Sequential([layers.Input((10,)), layers.Dense(units, "relu"), layers.Dense(12, "softmax")])


def data():
    x = np.random.default_rng(0).normal(size=(96, 10)).astype("float32")
    return {"train": (x, np.arange(96) % 12)}
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data:
  function: "mine.py:data"
  global_batch: 24
  class_weight: {0: 1, 1: 2.5, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 0.5, 11: 1}
compile: {optimizer: adam, loss: sparse_categorical_crossentropy}
train: {epochs: 2}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two epochs."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.yaml").write_text(CONFIG)
    rc, out, err = run("train", "mine.yaml", cwd=folder)
    assert rc == 0, out + err
    return folder


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> RunDir:
    """A copy of it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return RunDir(tmp_path / "runs" / "job")


def resume(job: RunDir, *settings: str) -> tuple[int, str]:
    words = [word for setting in settings for word in ("--set", setting)]
    rc, out, err = run("train", "runs/job", "--resume", *words, cwd=job.path.parents[1])
    return rc, " ".join((out + err).split())


def test_class_weights_of_many_classes_are_no_damage(job: RunDir) -> None:
    rc, said = resume(job, "train.epochs=3")
    assert rc == 0, said
    events = read_events(job.events)
    assert [event.step for event in events if isinstance(event, Restored)] == [8]
    assert [event.step for event in events if isinstance(event, EpochEnded)] == [4, 8, 12]
    assert not [event for event in events if isinstance(event, CheckpointFailed)]


def test_a_model_that_has_changed_is_told_and_the_run_stays_finished(job: RunDir) -> None:
    before = job.config.read_text()
    rc, said = resume(job, "train.epochs=3", "model.args.units=8")
    assert rc == 3
    assert "the checkpoint of step 8 does not fit this model" in said
    assert "the config has changed since in " in said
    assert "model.args.units: not set -> 8" in said
    assert "next" not in said  # nothing that would help
    assert job.config.read_text() == before
    assert job.finished()
    [listed] = json.loads(run("runs", "--json", cwd=job.path.parents[1])[1])
    assert (listed["status"], listed["epoch"], listed["epochs"]) == ("done", 2, 2)
    report = json.loads(run("report", "runs/job", "--json", cwd=job.path.parents[1])[1])
    assert report["status"] == "done"
    assert [attempt["status"] for attempt in report["attempts"]] == ["done", "failed"]


def test_when_all_checkpoints_are_damaged_nobody_begins_anew(job: RunDir) -> None:
    for step in job.checkpoint_steps():
        (job.checkpoints / f"step-{step:08d}" / "state.safetensors").write_bytes(b"torn")
    for _ in range(2):
        rc, said = resume(job, "train.epochs=3")
        assert rc == 3
        assert "all checkpoints are damaged: step-00000008, step-00000004" in said
        assert "to train from the beginning, start a new run or delete" in said
    assert len([event for event in read_events(job.events) if isinstance(event, TrainingStarted)]) == 1
    shutil.rmtree(job.checkpoints)  # as it was told to
    rc, said = resume(job, "train.epochs=3")
    assert rc == 0, said
    assert [event.first_step for event in read_events(job.events) if isinstance(event, TrainingStarted)] == [0, 0]


def test_another_order_of_examples_is_told(job: RunDir) -> None:
    rc, said = resume(job, "train.epochs=3", "seed=5", "data.shuffle=false")
    assert rc == 0, said
    assert "the order of the following examples differs, because of" in said
    assert "seed: 0 -> 5" in said
    assert "data.shuffle: true -> false" in said


def test_events_of_a_run_are_json_lines(job: RunDir) -> None:
    assert {line["format_version"] for line in json_lines(job.events.read_text())} == {2}
