"""`distlaunch plan` builds the model on its mesh, and draws what lies where."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import CONFIGS, run

from distlaunch.cluster.machine import Machine
from distlaunch.config.read.load import load_config
from distlaunch.jobs.describe import describe_variables
from tests.documents import snippet


@pytest.mark.parametrize("kind", ["jax", "dtensor"])
def test_plan_draws_the_mesh(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(kind if kind == "jax" else "tensorflow")
    if kind == "dtensor":  # a value of one's own costs one more process to fork from
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, out, err = run("plan", str(CONFIGS / f"mnist_mlp_{kind}.yaml"), cwd=tmp_path)
    assert code == 0, err
    bar = "│" if kind == "jax" else "|"
    for expected in (
        "mesh: batch 4 x model 2, 8 devices",
        f"batch 3 {bar}    6    {bar}    7    {bar}",
        "inputs [batch]",
        "[~, model]: model/mlp/d1/kernel, 2 optimizer variables",
        f"{bar} 0 2 4 6 {bar} 1 3 5 7 {bar}",
        f"model 1 {bar} 1 3 5 7 {bar}",
        "whole on all devices: model/mlp/d2/bias, 4 optimizer variables",
        "device:7          14   203.6 kB    407.1 kB   610.7 kB",
    ):
        assert expected in out.splitlines(), out
    if kind == "jax":
        for part in snippet("meshes.md", "mesh: batch 4").split("\n\n"):
            assert part.rstrip() in out
    assert not list(tmp_path.iterdir())


def test_an_open_size_of_the_mesh_is_filled_with_the_gpus() -> None:
    """The process that builds the model hides the GPUs, and shows the mesh of a run that uses them."""
    pytest.importorskip("jax")
    config = load_config(CONFIGS / "mnist_mlp_jax.yaml", ["strategy.mesh.batch=-1"]).config
    machine = Machine.here()
    machine.__dict__["gpus"] = tuple("012345")  # as if found
    placed = describe_variables(config, lambda problems: problems, machine)
    assert placed is not None
    assert placed.mesh is not None
    assert (placed.mesh["axes"], placed.mesh["shape"]) == (["batch", "model"], [3, 2])
