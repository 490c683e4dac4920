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

MINE = (Path(__file__).parent / "user_code" / "parts.py").read_text()
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
