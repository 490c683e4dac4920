"""Validation, `evaluate` and `predict` of jobs give the same twice, and without the parts that only training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real import json_lines, run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded
from distlaunch.base.run_dir import RunDir
from tests.properties import pure_parts

PARTS = pure_parts.__file__
CONFIG = f"""
model: {{function: "{PARTS}:model", args: {{rate: 0.5, normalises: true}}}}
data:
  function: "{PARTS}:data"
  args: {{tier: items}}
  global_batch: 13
  class_weight: {{0: 5.0, 2: 0.5}}
  train_examples: 40
compile:
  optimizer: adam
  loss: {{name: SparseCategoricalCrossentropy, args: {{from_logits: true}}}}
  metrics: [accuracy]
train: {{epochs: 1}}
"""
BY_EXAMPLE = ("data.remainder=drop", f"data.map={PARTS}:halved", f"data.augment={PARTS}:noisy")
JOBS = {
    "multi_worker_mirrored": ("strategy={kind: multi_worker_mirrored}", "cluster={workers: 2}"),
    "parameter_server": ("strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}", "train.steps_per_epoch=3"),
    "dtensor": ("strategy={kind: dtensor, mesh: {batch: 2}}",),
    "jax": ("strategy={kind: jax, mesh: {batch: 2}}", "cluster={workers: 2}"),
}
REMOVED = ("model.args.rate=0.0", "data.augment=null", "data.class_weight=null", "data.shuffle=false",
           "data.remainder=keep")  # fmt: skip


def options(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.mark.parametrize(("kind", "tier"), [
    pytest.param(kind, tier, marks=pytest.mark.slow)
    for kind in JOBS for tier in ("items", "unknown", "batches")
])  # fmt: skip
def test_in_jobs(kind: str, tier: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    keys = ("data.global_batch=null",) if tier == "batches" else BY_EXAMPLE
    code, out, err = run(
        "train", "job.yaml", "-q", *options(f"data.args.tier={tier}", *keys, *JOBS[kind]), cwd=tmp_path
    )
    assert code == 0, out + err
    found = seen_by_commands(tmp_path)
    assert_same(seen_by_commands(tmp_path), found, tolerance=1e-6)
    assert_same(seen_by_commands(tmp_path, *REMOVED), found, tolerance=1e-5)
    [epoch] = [event for event in read_events(RunDir(tmp_path / "runs/job").events) if isinstance(event, EpochEnded)]
    during = {key.removeprefix("val_"): value for key, value in epoch.logs.items() if key.startswith("val_")}
    assert found["validation"] == pytest.approx(during, rel=1e-5)


def seen_by_commands(folder: Path, *overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for split in ("train", "validation"):
        words = ("runs/job", "--split", split, *options(*overrides))
        code, out, err = run("evaluate", *words, "--json", cwd=folder)
        assert code == 0, out + err
        [found[split]] = [event["logs"] for event in json_lines(out) if event["event"] == "Evaluated"]
        code, out, err = run("predict", *words, "--output", f"{split}.npy", "-q", cwd=folder)
        assert code == 0, out + err
        found[f"{split} predictions"] = np.load(folder / f"{split}.npy")
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
        else:
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
