"""A checkpoint that two processes write together: one is killed in the middle, and the one before is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real import assert_nothing_left, final_state, run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, Restored, TaskFailed
from distlaunch.base.run_dir import RunDir

pytest.importorskip("jax")

MINE = """
import json, os, pathlib, signal
import keras, numpy as np
from distlaunch.training.checkpoints import writers

layers = keras.layers
given = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
order = pathlib.Path("order")

def die_once(who, step):
    if order.exists() and order.read_text() == who and step in (None, 20):
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

write, commit = writers.write_file, writers.CheckpointStore.commit

def write_file(folder, name, *words):
    (folder / name).write_bytes(b"half")
    die_once(f"part of {given['index']}", int(folder.name.split(".")[1].removeprefix("step-")))
    (folder / name).unlink()
    return write(folder, name, *words)

def commit_all(self, folder, files, progress, *words, **more):
    die_once("commit", progress.step)
    return commit(self, folder, files, progress, *words, **more)

writers.write_file, writers.CheckpointStore.commit = write_file, commit_all

def model():
    return keras.Sequential([layers.Input((12,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(4)])

def data():
    x = np.random.default_rng(0).normal(size=(96, 12)).astype("float32")
    return {"train": (x, x[:, :4])}
"""
CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 24}
compile: {optimizer: {name: SGD, args: {learning_rate: 0.01, momentum: 0.9}}, loss: mse}
train: {epochs: 8, steps_per_call: 1}
strategy: {kind: KIND, mesh: {model: 2, batch: 2}, layout: {"dense/kernel": [null, model]}}
cluster: {workers: 2}
checkpoint: {every_epochs: null, every_steps: 10}
restarts: {max: 1}
"""
ELSEWHERE = "strategy={kind: KIND, mesh: {batch: 1, model: 4}}"


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        pytest.param("jax", "part of 1", marks=pytest.mark.slow),
        pytest.param("jax", "commit", marks=pytest.mark.slow),
        pytest.param("dtensor", "part of 1", marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle(kind: str, victim: str, tmp_path: Path) -> None:
    """Each process holds one half of a weight; what they have written is read on one device, and on another mesh."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.yaml").write_text(CONFIG.replace("KIND", kind))
    (tmp_path / "order").write_text(victim)
    code, _, err = run("train", "job.yaml", "--name", "cut", cwd=tmp_path)
    assert code == 0, err
    cut = RunDir(tmp_path / "runs" / "cut")
    assert_nothing_left(cut)
    events = read_events(cut.events)
    [failed] = [event for event in events if isinstance(event, TaskFailed)]
    assert "SIGKILL" in failed.reason
    assert [event.step for event in events if isinstance(event, Restored)] == [10]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [10, 20, 30, 32]
    names = sorted(path.name for path in cut.checkpoints.iterdir())
    assert names == ["step-00000020", "step-00000030", "step-00000032"]
    newest = cut.checkpoints / "step-00000032"
    assert len(list(newest.glob("state-*-of-00002.safetensors"))) == 2

    code, _, err = run("train", "job.yaml", "--name", "whole", "--set", "strategy={kind: one_device}", "--set",
                       "cluster.workers=1", cwd=tmp_path)  # fmt: skip
    assert code == 0, err
    expected, got = final_state(RunDir(tmp_path / "runs" / "whole")), final_state(cut)
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    more = ("--resume", "--set", "train.epochs=9", "--set", "cluster.workers=1", "--set")
    for strategy in ("strategy={kind: one_device}", ELSEWHERE.replace("KIND", kind)):
        code, _, err = run("train", str(cut.path), *more, strategy, cwd=tmp_path)
        assert code == 0, err
        more = (*more[:2], "train.epochs=10", *more[3:])
