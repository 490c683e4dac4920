"""Every optimizer of Keras on meshes, with slots split like their weights, compared with one device."""

from __future__ import annotations

import pytest

from tests.once import once
from tests.parity.cases import CASES
from tests.parity.compare import TOLERANCE, deviations, weight_deviation
from tests.parity.jax_cases import EVERY_OPTIMIZER
from tests.parity.test_dtensor import train_dtensor
from tests.parity.test_jax import MESHES, train
from tests.parity.test_replicas import check

pytest.importorskip("jax")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("virtual_devices")]
MESH = "2x2x2"
# on TensorFlow Keras 3.15 reads its momentum after the update where the method, and Keras on JAX, mean it from before
DIFFERS = "optimizer ScheduleFreeAdamW"
SAME = [name for name in EVERY_OPTIMIZER if name != DIFFERS]


@pytest.fixture(autouse=True)
def known(monkeypatch) -> None:
    for name, config in EVERY_OPTIMIZER.items():
        monkeypatch.setitem(CASES, name, config)


@pytest.mark.parametrize("name", SAME)
def test_dtensor(name: str, one_device) -> None:
    check(train_dtensor(name, MESHES[MESH]), one_device(name))


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory) -> dict[str, dict]:
    jobs = [(name, MESH) for name in EVERY_OPTIMIZER]
    return once(tmp_path_factory, "optimizers", lambda folder: train(jobs, folder))


@pytest.mark.parametrize("name", SAME)
def test_jax(name: str, on_jax: dict[str, dict], one_device) -> None:
    check(on_jax[f"{name} | {MESH}"], one_device(name))


def test_what_keras_computes_otherwise_on_tensorflow(on_jax: dict[str, dict]) -> None:
    ours, theirs = train_dtensor(DIFFERS, MESHES[MESH]), on_jax[f"{DIFFERS} | {MESH}"]
    assert float(deviations(ours, theirs).max()) <= TOLERANCE
    assert weight_deviation(ours, theirs) <= TOLERANCE
