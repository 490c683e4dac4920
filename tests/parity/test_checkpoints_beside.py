"""Checkpoints written beside training are equal, bit by bit, to checkpoints for which training waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, RunEnded
from distlaunch.checkpoints.store import CheckpointStore

HERE = "tests.parity.test_checkpoints_beside"


def data() -> dict[str, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(640, 32)).astype(np.float32)
    return {"train": (x, x.sum(1, keepdims=True)), "validation": (x[:64], x[:64, :1])}


def model() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential([layers.Input((32,)), layers.Dense(512), layers.Dropout(0.2), layers.Dense(1)])


def train(folder: Path, *, beside: bool) -> CheckpointStore:
    from distlaunch import notebook

    best = {"name": "EarlyStopping", "args": {"patience": 5, "restore_best_weights": True}}
    notebook.train(
        {
            "name": "run",
            "runs_dir": str(folder),
            "determinism": True,
            "model": {"function": f"{HERE}:model"},
            "data": {"function": f"{HERE}:data", "global_batch": 32},
            "compile": {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]},
            "train": {"epochs": 3, "steps_per_call": 1, "callbacks": [best]},
            "checkpoint": {"async": beside, "every_steps": 3, "keep": 100},
        }
    )
    return CheckpointStore(folder / "run" / "checkpoints")


@pytest.mark.usefixtures("virtual_devices")
def test_every_checkpoint_is_the_same(tmp_path: Path) -> None:
    beside, waiting = (train(tmp_path / str(way), beside=way) for way in (True, False))
    assert beside.steps() == waiting.steps()
    assert len(beside.steps()) == 22
    for step in beside.steps():
        one, other = beside.load(step), waiting.load(step)
        assert repr(one.progress) == repr(other.progress)
        assert list(one.state) == list(other.state)
        different = [name for name, value in one.state.items() if value.tobytes() != other.state[name].tobytes()]
        assert not different, f"step {step}"
    events = read_events(tmp_path / "True" / "run" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == beside.steps()
    assert isinstance(events[-1], RunEnded)
