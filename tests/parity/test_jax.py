"""Every mesh of JAX devices gives the numbers of one TensorFlow device, random masks included."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.parity.cases import CASES
from tests.parity.compare import TOLERANCE, deviations
from tests.parity.jax_cases import FEATURES, PARTLY_DECAYED, REFERENCE_STEP, SATURATED, SPECTRAL
from tests.parity.test_replicas import check
from tests.warm import run_module

pytest.importorskip("jax")

MESHES: dict[str, dict[str, Any]] = {
    "1": {"mesh": {"batch": 1}},
    "8": {"mesh": {"batch": 8}},
    "4x2": {"mesh": {"batch": 4, "model": 2}, "layout": "auto"},
    "2x2x2": {
        "mesh": {"batch": 2, "feature": 2, "model": 2},
        "layout": {"dense/kernel": ["feature", "model"], "dense/bias": ["model"], "dense_1/kernel": ["model", None]},
        "input_layout": ["batch", "feature"],
    },
    "2x2x2, no rules": {
        "mesh": {"batch": 2, "feature": 2, "model": 2},
        "input_layout": ["batch", "feature"],
    },
    "2x2": {"mesh": {"batch": 2, "feature": 2}, "input_layout": ["batch", "feature"]},
}
# written for TensorFlow; JAX says so
ON_TENSORFLOW = ("own step function", "own train_step", "two optimizers", "tf.Module")
# Gradients are dense on a mesh; Keras's optimizers on TensorFlow update repeated rows of sparse ones otherwise
SPARSE = "embeddings, sparse gradients"
COMPARED = [name for name in CASES if name not in (*ON_TENSORFLOW, SPARSE, "BatchNorm over replicas")]
ODD = ("two inputs, two outputs", "masked tokens")  # their inputs have dimensions that 2 does not divide
WANTED = ("8", "4x2", "2x2x2")


def meshes_of(name: str) -> list[str]:
    return [mesh for mesh in WANTED if not (name in ODD and mesh == "2x2x2")]


ALL = [(name, mesh) for name in COMPARED for mesh in meshes_of(name)]
ALL += [("BatchNorm over replicas", mesh) for mesh in ("8", "4x2", "2x2")]
# what neither the grid (see grid.py) nor test_mesh_processes.py has; every mesh
FAST = [
    ("mlp rmsprop, L2", "8"),
    # with an axis that splits nothing, on which XLA's own gradients of convolutions are wrong
    ("BatchNorm over replicas", "2x2x2, no rules"),
    ("average of weights", "2x2x2"),
    (PARTLY_DECAYED, "8"),
    (SPECTRAL, "4x2"),
    (SATURATED, "4x2"),
]
OWN_STEP = ("own step of JAX", "4x2")
OWN_TRAIN_STEP = "own train_step of JAX"


def train(jobs: list[tuple[str, str]], folder: Path, meshes: dict[str, dict] = MESHES) -> dict[str, dict]:
    """Records by `case | mesh`, from a process whose Keras runs on JAX."""
    listed = [[f"{name} | {mesh}", name, {"strategy": {"kind": "jax", **meshes[mesh]}}] for name, mesh in jobs]
    arguments = [str(folder / "records.json"), json.dumps(listed)]
    run_module("tests.parity.train_jobs", arguments, backend="jax")
    return json.loads((folder / "records.json").read_text())


@pytest.fixture(scope="module")
def fast(tmp_path_factory) -> dict[str, dict]:
    jobs = [*FAST, OWN_STEP, (OWN_TRAIN_STEP, "1"), (OWN_TRAIN_STEP, "4x2")]
    return once(tmp_path_factory, "jax", lambda folder: train(jobs, folder))


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> dict[str, dict]:
    return once(tmp_path_factory, "jax_all", lambda folder: train(ALL, folder))


@pytest.fixture(autouse=True)
def features(monkeypatch) -> None:
    """Cases that are compared on JAX only."""
    for extra, config in FEATURES.items():
        monkeypatch.setitem(CASES, extra, config)


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_mesh(name: str, mesh: str, fast, one_device) -> None:
    record = fast[f"{name} | {mesh}"]
    check(record, one_device(name))
    assert bool(record["shards"]) == ("layout" in MESHES[mesh]), "the mesh splits variables by its rules"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), ALL)
def test_mesh_all(name: str, mesh: str, slow, one_device) -> None:
    check(slow[f"{name} | {mesh}"], one_device(name))


def test_own_train_step(fast) -> None:
    record, expected = fast[f"{OWN_TRAIN_STEP} | 4x2"], fast[f"{OWN_TRAIN_STEP} | 1"]
    assert float(deviations(record, expected).max()) <= TOLERANCE
    assert "rows" in record["steps"][0]


def test_own_step_function(fast, one_device, monkeypatch) -> None:
    monkeypatch.setitem(CASES, "reference step", REFERENCE_STEP)
    record = copy.deepcopy(fast[" | ".join(OWN_STEP)])
    assert all(logs.pop("largest") > 0 for logs in [*record["steps"], *record["epochs"]])
    check(record, one_device("reference step"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("tf.Module", "strategy jax needs a keras.Model", marks=pytest.mark.slow),
        ("own train_step", r"train_step\(self, state, data\) -> logs, state"),
        pytest.param("own step function", r"step\(context, state, batch\) -> \(logs, state\)", marks=pytest.mark.slow),
    ],
)
def test_what_is_written_for_tensorflow_is_refused(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=told):
        train([(name, "8")], tmp_path)
