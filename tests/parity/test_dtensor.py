"""Every DTensor mesh gives the numbers of one device, dropout masks included."""

from __future__ import annotations

import pytest

from tests.parity.cases import CASES
from tests.parity.compare import deviations
from tests.parity.jax_cases import FEATURES, PARTLY_DECAYED, SPECTRAL
from tests.parity.test_jax import MESHES, SPARSE, meshes_of
from tests.parity.test_replicas import check

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")

IMAGES = "BatchNorm over replicas"  # has no dense_1, which the rules of 2x2x2 name
RUNNING = [name for name in CASES if name != SPARSE]
# what neither the grid (see grid.py; its sentiment model is a tf.Module) nor test_mesh_processes.py has; every mesh;
# test_jax.py has two inputs and outputs, and BatchNorm
FAST = [
    ("own train_step", "4x2"),
    (PARTLY_DECAYED, "8"),
]
ALL = [(name, mesh) for name in RUNNING for mesh in meshes_of(name) if name != IMAGES or mesh != "2x2x2"]


@pytest.fixture(autouse=True)
def features(monkeypatch) -> None:
    monkeypatch.setitem(CASES, PARTLY_DECAYED, FEATURES[PARTLY_DECAYED])


def train_dtensor(name: str, mesh: dict) -> dict:
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create
    from tests.parity.train_case import train_case

    config = RunConfig.model_validate({**CASES[name], "strategy": {"kind": "dtensor", **mesh}})
    return train_case(name, create(config), config=config)


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_mesh(name: str, mesh: str, one_device) -> None:
    record = train_dtensor(name, MESHES[mesh])
    check(record, one_device(name))
    assert bool(record["shards"]) == ("model" in MESHES[mesh]["mesh"]), "the mesh splits variables over the axis model"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), ALL)
def test_mesh_all(name: str, mesh: str, one_device) -> None:
    check(train_dtensor(name, MESHES[mesh]), one_device(name))


@pytest.mark.slow  # in CI the grid accumulates, and test_jax.py has the others
@pytest.mark.parametrize("name", [name for name in FEATURES if name != SPECTRAL])  # DTensor refuses it
def test_what_optimizers_do_now_and_then(name: str, one_device, monkeypatch) -> None:
    """Accumulated gradients, averages that overwrite weights, schedules: Keras branches, DTensor must not."""
    monkeypatch.setitem(CASES, name, FEATURES[name])
    check(train_dtensor(name, MESHES["2x2x2"]), one_device(name))


@pytest.mark.slow  # of TensorFlow, and not of the program: of interest when its version changes
def test_a_step_that_reads_what_it_has_assigned_is_found_out(one_device, monkeypatch) -> None:
    """DTensor may give the old value, without an error. If it stops doing so, this test fails: good news."""
    from distlaunch.patches.keras_private import value_of
    from distlaunch.strategies.dtensor import program as dtensor_program

    def assign_in_two_halves(variables, before, values) -> None:
        for variable, value in zip(variables, values, strict=True):
            on_mesh = value_of(variable).on_mesh
            if not value.dtype.is_floating:
                on_mesh.assign(value)
                continue
            half = (value - on_mesh.read_value()) / 2
            on_mesh.assign(on_mesh.read_value() + half)
            on_mesh.assign(on_mesh.read_value() + half)  # reads what was assigned one line above

    monkeypatch.setattr(dtensor_program, "assign_new", assign_in_two_halves)
    record = train_dtensor("mlp sgd, uneven", MESHES["8"])
    worst = float(deviations(record, one_device("mlp sgd, uneven").record)[:3].max())
    assert worst > 1e-2
