"""Checkpoints of real jobs: by the clock, beside training, and the best one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from real import assert_nothing_left, final_state, finish, json_lines, run, start

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, EpochEnded, RunEnded
from distlaunch.base.run_dir import RunDir

MINE = """
import keras, numpy as np


def model(act="relu"):
    layers = keras.layers
    return keras.Sequential([layers.Input((10,)), layers.Dense(16, act), layers.Dense(1)])


def data():
    x = np.random.default_rng(0).normal(size=(960, 10)).astype("float32")
    y = x.sum(1, keepdims=True)
    return {"train": (x, y), "validation": (x[:96], y[:96])}
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 24}
compile: {optimizer: adam, loss: mse}
train: {epochs: 2, steps_per_call: 1}
"""


def write(folder: Path, text: str = "") -> RunDir:
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.yaml").write_text(CONFIG + text)
    return RunDir(folder / "runs" / "job")


def test_all_processes_save_when_the_clock_of_the_chief_says_so(tmp_path: Path) -> None:
    job = write(
        tmp_path,
        "strategy: {kind: multi_worker_mirrored}\n"
        "cluster: {workers: 2}\n"
        "checkpoint: {every_epochs: null, every_minutes: 0.0002, keep: 100}\n",
    )
    code, out, err = finish(start("train", "mine.yaml", "--set", "train.epochs=1", cwd=tmp_path))
    assert code == 0, out + err
    events = read_events(job.events)
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert len(saved) > 2, saved
    assert saved == sorted(set(saved))
    assert saved[-1] == 40
    assert job.checkpoint_steps() == saved
    assert isinstance(events[-1], RunEnded)
    assert_nothing_left(job)


def test_a_run_without_any_period_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "checkpoint: {every_epochs: null}\n")
    code, out, err = run("validate", "mine.yaml", cwd=tmp_path)
    assert code == 2
    assert "got null for all of every_epochs, every_steps, every_minutes, every" in " ".join((out + err).split())


OWN_STEP = """

def step(context, batch):
    import tensorflow as tf
    x, y = batch
    with tf.GradientTape() as tape:
        loss = context.average(context.per_example_loss(y, context.model(x, training=True)))
    context.apply(tape, loss)
    return {"mine": loss}
"""
OWN_LOOP = ("--set", "train.loop=custom", "--set", "train.step=mine.py:step")
BEST = "validation: {{}}\ncheckpoint: {{keep: 1, best: {{metric: {metric}, mode: {mode}}}}}\n"


def test_the_best_one_is_kept_and_found_and_a_resumed_run_knows_it(tmp_path: Path) -> None:
    """The loss falls, so the first epoch has the highest. Its checkpoint is used with its own model."""
    job = write(tmp_path, BEST.format(metric="val_loss", mode="max"))
    resume = ["runs/job", "--resume", "--set", "train.epochs=3", "--set", "model.args.act=selu"]
    for words in (["mine.yaml"], resume):
        code, out, err = run("train", *words, cwd=tmp_path)
        assert code == 0, out + err
        assert job.checkpoint_steps() == [40 * (2 if words == ["mine.yaml"] else 3)]
    first, *_ = [event for event in read_events(job.events) if isinstance(event, EpochEnded)]
    code, out, err = run("evaluate", "runs/job", "--checkpoint", "best", "--json", cwd=tmp_path)
    assert code == 0, out + err
    [found] = [line for line in json_lines(out) if line["event"] == "Evaluated"]
    assert (found["step"], found["logs"]["loss"]) == (40, pytest.approx(first.logs["val_loss"], rel=1e-6))
    code, out, err = run("predict", "runs/job", "--checkpoint", "best", cwd=tmp_path)
    assert code == 0, out + err
    assert job.predictions("validation", 40).exists()
    code, out, err = run("report", "runs/job", cwd=tmp_path)
    assert "runs/job/checkpoints/best (best)\n" in out
    assert "runs/job/checkpoints/step-00000120\n" in out


def test_a_checkpoint_is_listed(tmp_path: Path) -> None:
    job = write(tmp_path, BEST.format(metric="val_loss", mode="max"))
    assert run("train", "mine.yaml", cwd=tmp_path)[0] == 0
    code, out, err = run("report", "runs/job", "--checkpoint", "--json", cwd=tmp_path)
    assert code == 0, err
    listing = json.loads(out)
    assert (listing["step"], listing["epoch"]) == (80, 2)
    state = final_state(job)
    found = {variable["name"]: variable for variable in listing["variables"]}
    assert found.keys() >= state.keys()
    for name, value in state.items():
        norm = pytest.approx(np.sqrt((value.astype(np.float64) ** 2).sum()))
        expected = {"name": name, "shape": list(value.shape), "dtype": value.dtype.name, "bytes": value.nbytes}
        assert found[name] == {**expected, "norm": norm}
    code, out, err = run("report", "runs/job", "--checkpoint", "best", cwd=tmp_path)
    assert code == 0, err
    head, _, columns, *rows = out.splitlines()
    assert head.startswith("runs/job/checkpoints/best: step 40, in epoch 2; ")
    assert columns.split() == ["variable", "shape", "type", "size", "norm"]
    assert any(row.startswith("model/sequential/dense/kernel  ") and "10 x 16" in row for row in rows)
    assert run("report", "runs/job", "--checkpoint", "7", cwd=tmp_path)[0] == 2
    next(job.checkpoints.glob("step-*/meta.json")).write_text("torn")
    code, out, err = run("report", "runs/job", "--checkpoint", "80", cwd=tmp_path)
    assert code == 3
    assert "damaged" in err
    assert "Traceback" not in err


def best_step(job: RunDir) -> int:
    found = job.best_checkpoint()
    assert found is not None
    return found[0]


@pytest.mark.slow  # in CI the best one is kept and found, above
def test_another_mode_at_a_resume_finds_the_best_of_what_was_trained(tmp_path: Path) -> None:
    """The loss falls, so the highest is that of the first epoch, and the lowest that of the last."""
    job = write(tmp_path, BEST.format(metric="val_loss", mode="max"))
    assert run("train", "mine.yaml", cwd=tmp_path)[0] == 0
    assert best_step(job) == 40
    resume = ("train", "runs/job", "--resume", "--set")
    code, out, err = run(*resume, "checkpoint.best.mode=min", "--set", "train.epochs=3", cwd=tmp_path)
    assert code == 0, out + err
    assert best_step(job) == 120
    # back again: the first epoch's checkpoint is gone by now
    code, out, err = run(*resume, "checkpoint.best.mode=max", "--set", "train.epochs=4", cwd=tmp_path)
    assert code == 0, out + err
    assert "epoch 1 is the best so far by val_loss (max), but its checkpoint no longer exists" in out + err
    # so that the best is looked for anew, among the epochs that follow
    assert best_step(job) == 160


def test_a_best_value_that_there_is_not_is_named_before_the_first_epoch_ends(tmp_path: Path) -> None:
    job = write(tmp_path, BEST.format(metric="val_accuracy", mode="max"))
    code, out, err = run("train", "mine.yaml", cwd=tmp_path)
    assert code == 2
    assert not [event for event in read_events(job.events) if isinstance(event, EpochEnded)]
    said = " ".join((out + err).split())
    assert "checkpoint.best.metric: got 'val_accuracy', which this run does not have; it has loss, val_loss" in said
    assert "Traceback" not in said
    write(tmp_path, BEST.format(metric="val_loss", mode="min").replace("{}", "null"))
    code, out, err = run("validate", "mine.yaml", cwd=tmp_path)
    assert code == 2
    assert "checkpoint.best.metric: got 'val_loss', but there is no validation" in " ".join((out + err).split())


def test_a_step_of_the_users_own_may_report_other_values_than_validation(tmp_path: Path) -> None:
    job = write(tmp_path, BEST.format(metric="val_loss", mode="min"))
    (tmp_path / "mine.py").write_text(MINE + OWN_STEP)
    code, out, err = run("train", "mine.yaml", *OWN_LOOP, cwd=tmp_path)
    assert code == 0, out + err
    assert best_step(job) == 80


def test_a_run_without_a_best_one_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    assert run("train", "mine.yaml", "--set", "train.epochs=1", cwd=tmp_path)[0] == 0
    code, out, err = run("evaluate", "runs/job", "--checkpoint", "best", cwd=tmp_path)
    assert code == 2
    assert "runs/job has no best checkpoint; set `checkpoint.best`" in out + err
