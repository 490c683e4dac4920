"""A mesh over real processes: trained, evaluated, exported; killed, stopped, and gone on with on another mesh."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from real import assert_nothing_left, at_step, final_state, finish, kill_task, run, start, wait_for

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, Event, Restored, StepsDone, TrainingStarted
from distlaunch.base.run_dir import RunDir

pytest.importorskip("jax")

MINE = """
import keras, numpy as np

layers = keras.layers

def model():
    return keras.Sequential([layers.Input((12,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(4)])

def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(89, 12)).astype("float32")
    return {"train": (x, x[:, :4]), "validation": (x[:33], x[:33, :4])}
"""
CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 24}
compile: {optimizer: {name: SGD, args: {learning_rate: 0.01}}, loss: mse, metrics: [mae]}
train: {epochs: 40}
strategy: {kind: KIND, mesh: {batch: 2, model: 2}, layout: auto}
cluster: {workers: 2}
checkpoint: {every_epochs: null, every_steps: 10}
"""
OFTEN = ("--set", "train.log_every_steps=1", "--set", "train.steps_per_call=1")
ELSEWHERE = ("--set", "cluster.workers=1", "--set", "strategy.mesh={batch: 1, model: 4}", "--set", "export=[keras]")


@pytest.mark.parametrize(
    ("kind", "killed"),
    [
        # in CI test_parts.py kills one of two, and tests/parity/test_any_to_any.py goes on elsewhere
        pytest.param("jax", False, marks=pytest.mark.slow),
        pytest.param("jax", True, marks=pytest.mark.slow),
        pytest.param("dtensor", True, marks=pytest.mark.slow),
    ],
)
def test_two_processes(kind: str, killed: bool, tmp_path: Path) -> None:
    """Kill -9 of one ends both and is told; stopped, the run goes on in one process, and ends as one never stopped."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mesh.yaml").write_text(CONFIG.replace("KIND", kind))
    one = ("--set", "strategy={kind: one_device}", "--set", "cluster.workers=1")
    code, _, err = run("train", "mesh.yaml", *one, "--name", "whole", cwd=tmp_path)
    assert code == 0, err
    whole, cut = RunDir(tmp_path / "runs" / "whole"), RunDir(tmp_path / "runs" / "cut")

    job = start("train", "mesh.yaml", *OFTEN, "--name", "cut", cwd=tmp_path)
    wait_for(cut, at_step(23))
    if killed:
        kill_task(cut, 1)
        code, _, err = finish(job)
        assert code == 3, err
        assert "worker:1" in err, err
        assert "SIGKILL" in err, err
        assert_nothing_left(cut)
        job = start("train", str(cut.path), "--resume", cwd=tmp_path)
        wait_for(cut, went_on)
    job.send_signal(signal.SIGTERM)
    code, out, err = finish(job)
    assert code == 4, err
    assert "Traceback" not in out + err
    assert_nothing_left(cut)
    stopped_at = max(int(path.name.removeprefix("step-")) for path in cut.checkpoints.glob("step-*"))

    code, _, err = run("train", str(cut.path), "--resume", *ELSEWHERE, cwd=tmp_path)
    assert code == 0, err
    assert (cut.export / "model.keras").exists()
    events = read_events(cut.events)
    assert restored(events)[-1].step == stopped_at
    started = [(event.tasks, event.replicas) for event in events if isinstance(event, TrainingStarted)]
    assert (started[0], started[-1]) == ((2, 2), (1, 1))
    expected, got = final_state(whole), final_state(cut)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert last_epoch(cut) == pytest.approx(last_epoch(whole), rel=1e-5)


def restored(events: list[Event]) -> list[Restored]:
    return [event for event in events if isinstance(event, Restored)]


def went_on(events: list[Event]) -> bool:
    """Return whether steps were completed after the last checkpoint was read."""
    last = max((index for index, event in enumerate(events) if isinstance(event, Restored)), default=len(events))
    return any(isinstance(event, StepsDone) for event in events[last:])


def last_epoch(run_dir: RunDir) -> dict[str, float]:
    return [event for event in read_events(run_dir.events) if isinstance(event, EpochEnded)][-1].logs
