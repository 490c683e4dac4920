"""Runs on other versions of frameworks than those with which distlaunch is tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real import run

from distlaunch.base.compat import TESTED, installed
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Notice
from distlaunch.base.run_dir import RunDir

MINE = """
import keras, numpy as np


def net():
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def later_keras():
    import keras.src.losses.loss as module
    module.scale_loss_for_distribution = lambda value, replicas=1: value
    return net()


def data():
    x = np.arange(32 * 3, dtype="float32").reshape(32, 3) / 96
    return x, x.sum(1, keepdims=True)
"""
CONFIG = """
name: mine
model: {function: "mine.py:net"}
data: {function: "mine.py:data", global_batch: 8}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 1}
strategy: {kind: one_device}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def test_a_part_that_does_not_fit_is_refused(folder: Path) -> None:
    overrides = ("model.function=mine.py:later_keras", "strategy={kind: mirrored, replicas: 2}")
    words = [word for override in overrides for word in ("--set", override)]
    code, out, err = run("train", "run.yaml", *words, cwd=folder)
    assert code == 2, err
    assert "Traceback" not in out + err
    told = (
        f"keras {installed('keras')}: keras.src.losses.loss.scale_loss_for_distribution takes (value, replicas=1), "
        "expected (value); distlaunch changes or uses this part of keras, so this version cannot be used here; "
        f"install a tested version: pip install 'keras{TESTED['keras']}'"
    )
    assert told in err
    code, out, _ = run("report", "runs/mine", "--json", cwd=folder)
    assert json.loads(out)["attempts"][0]["reason"] == told


@pytest.mark.slow  # in CI tests/unit/test_compat.py has the warning
def test_an_untested_version_is_told_once_a_run(folder: Path) -> None:
    site = folder / "site"
    (site / "keras-9.1.2.dist-info").mkdir(parents=True)
    (site / "keras-9.1.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.1.2\n")
    code, out, err = run("train", "run.yaml", cwd=folder, path=[site])
    assert code == 0, err
    warning = f"warning: keras 9.1.2 is installed; this distlaunch is tested with keras{TESTED['keras']}; "
    assert out.count(warning) == 1
    code, out, err = run("train", "run.yaml", "--resume", "--set", "train.epochs=2", cwd=folder, path=[site])
    assert code == 0, err
    assert warning not in out
    notices = [event for event in read_events(RunDir(folder / "runs/mine").events) if isinstance(event, Notice)]
    assert [notice.level for notice in notices if "keras 9.1.2" in notice.message] == ["warning"]
