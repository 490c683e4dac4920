"""A mesh over the devices of two processes gives the numbers of one device, uneven last batches included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlaunch.config.strategies import MODELS
from tests.once import once
from tests.parity.test_jax import MESHES
from tests.parity.test_replicas import check
from tests.parity.workers import run_workers

pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("virtual_devices")
WORKERS = 2
KINDS = ("jax", "dtensor")
FAST = [("random layers", "4x2")]
MESHES["model 8"] = {"mesh": {"model": 8}, "layout": "auto"}  # each process holds a part of each weight
MESHES["model first"] = {"mesh": {"model": 2, "batch": 4}, "layout": "auto"}  # every process reads whole batches
SLOW = [
    ("mlp sgd, uneven", "2x2x2"),
    ("mlp momentum, last batch of one row", "4x2"),
    ("mlp L2, custom", "4x2"),
    ("mlp adamw clipped, skewed", "model 8"),
    ("sample weights", "model first"),
    ("unknown length", "8"),
    ("two inputs, two outputs", "4x2"),
    ("masked tokens", "8"),
    ("BatchNorm over replicas", "8"),
]


def train_in_processes(kind: str, jobs: list[tuple[str, str]], folder: Path) -> dict[str, dict]:
    """Records by `case | mesh`, from two processes that share the devices."""
    listed = [[f"{name} | {mesh}", name, {"strategy": {"kind": kind, **MESHES[mesh]}}] for name, mesh in jobs]
    run_workers(
        folder,
        "tests.parity.train_jobs",
        [str(folder / "records.json"), json.dumps(listed)],
        WORKERS,
        backend=MODELS[kind].backend,
    )
    return json.loads((folder / "records.json").read_text())


# in CI processes/test_parts.py compares two processes of jax with one device
@pytest.fixture(scope="module", params=[pytest.param("jax", marks=pytest.mark.slow), "dtensor"])
def fast(request, tmp_path_factory) -> dict[str, dict]:
    kind = request.param
    return once(tmp_path_factory, f"pair-{kind}", lambda folder: train_in_processes(kind, FAST, folder))


@pytest.fixture(scope="module", params=KINDS)
def slow(request, tmp_path_factory) -> dict[str, dict]:
    kind = request.param
    return once(tmp_path_factory, f"pair-{kind}-slow", lambda folder: train_in_processes(kind, SLOW, folder))


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_two_processes(name: str, mesh: str, fast, one_device) -> None:
    check(fast[f"{name} | {mesh}"], one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), SLOW)
def test_two_processes_all(name: str, mesh: str, slow, one_device) -> None:
    check(slow[f"{name} | {mesh}"], one_device(name))
