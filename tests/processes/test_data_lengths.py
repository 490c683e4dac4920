"""Processes whose data functions give them data of different lengths say so; none waits for the others for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import assert_nothing_left, run

from distlaunch.base.run_dir import RunDir

MINE = """
import json, os
import keras, numpy as np, tensorflow as tf


def model():
    return keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(1)])


def data(train="whole", validation="whole"):
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    worker = task["index"] if task["type"] == "worker" else 0
    x = np.random.default_rng(0).normal(size=(320, 10)).astype("float32")

    def split(kind):
        number = 320 if kind == "whole" else 320 - 64 * worker
        arrays = x[:number], x[:number].sum(1, keepdims=True)
        if kind != "unknown":
            return arrays
        return tf.data.Dataset.from_tensor_slices(arrays).filter(lambda x, y: True)

    return {"train": split(train), "validation": split(validation)}
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32, shuffle: false}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 3}
"""
REPLICAS = ("strategy={kind: multi_worker_mirrored}", "cluster.workers=2")
SERVERS = ("strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}")
SERVERS_UNKNOWN = (*SERVERS, "train.steps_per_epoch=10")
JAX = ("strategy={kind: jax, mesh: {batch: 2}}", "cluster.workers=2")
DTENSOR = ("strategy={kind: dtensor, mesh: {batch: 2}}", "cluster.workers=2")
KNOWN = (
    "worker:0 has 320 examples for training and 320 examples for validation; "
    "worker:1 has 256 examples for training and 320 examples for validation"
)
AFTER = "ended after 8 global batches in worker:1, but not in worker:0"


@pytest.mark.parametrize(
    ("strategy", "split", "kind", "code", "told"),
    [
        (REPLICAS, "train", "known", 2, KNOWN),
        pytest.param(REPLICAS, "train", "unknown", 3, AFTER, marks=pytest.mark.slow),
        pytest.param(REPLICAS, "validation", "unknown", 3, AFTER, marks=pytest.mark.slow),
        (SERVERS, "train", "known", 2, "chief has 10 global batches for training; worker:1 has 8"),
        (SERVERS_UNKNOWN, "train", "unknown", 3, AFTER),
        pytest.param(JAX, "train", "unknown", 3, AFTER, marks=pytest.mark.slow),
        pytest.param(JAX, "validation", "unknown", 3, AFTER, marks=pytest.mark.slow),
        pytest.param(JAX, "train", "known", 2, KNOWN, marks=pytest.mark.slow),
        pytest.param(DTENSOR, "train", "known", 2, KNOWN, marks=pytest.mark.slow),
        pytest.param(DTENSOR, "train", "unknown", 3, AFTER, marks=pytest.mark.slow),
        (DTENSOR, "validation", "unknown", 3, AFTER),
    ],
)
def test_lengths_are_named(tmp_path: Path, strategy: tuple, split: str, kind: str, code: int, told: str) -> None:
    if strategy is JAX:
        pytest.importorskip("jax")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    settings = [word for value in (*strategy, f"data.args.{split}={kind}") for word in ("--set", value)]
    rc, out, err = run("train", "mine.yaml", *settings, cwd=tmp_path)
    assert rc == code, out + err
    assert not (tmp_path / "runs" / "job" / "attempts" / "1").exists()
    assert told in " ".join((out + err).split())
    assert ".shard()" in out + err
    if told is AFTER:
        kind = "validation" if split == "validation" else "training"
        assert f"read {kind} data of different lengths" in " ".join((out + err).split())
    assert_nothing_left(RunDir(tmp_path / "runs" / "job"))
