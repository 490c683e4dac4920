"""Processes whose data functions give them data of different lengths say so; none waits for the others for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import assert_nothing_left, run

from distlaunch.base.run_dir import RunDir

MINE = (Path(__file__).parent / "user_code" / "data_lengths.py").read_text()
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
