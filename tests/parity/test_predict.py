"""Every strategy predicts what one device predicts, each example once and in order."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parity.test_jax import MESHES
from tests.parity.workers import run_workers
from tests.strategies import WITH_REPLICAS_HERE, sections

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")

NAMES = ("mlp adam", "two inputs, two outputs", "subclassed")  # one array, a dict of arrays, a model that is built late
STRATEGIES = {
    **{kind: sections(kind, 3)["strategy"] for kind in WITH_REPLICAS_HERE},
    "dtensor 4x2": {"kind": "dtensor", **MESHES["4x2"]},
    "dtensor 8": {"kind": "dtensor", **MESHES["8"]},
}


def predict(name: str, kind: dict) -> dict[str, np.ndarray]:
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create
    from tests.parity.cases import CASES
    from tests.parity.predict_case import predict_case

    config = RunConfig.model_validate({**CASES[name], "strategy": kind})
    return predict_case(name, create(config), kind)


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    """Keras's own: the model called on all rows at once."""
    import keras

    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.replica.one_device import OneDevice
    from distlaunch.training.build import build_model
    from distlaunch.training.predictions import named_arrays
    from tests.parity import problems
    from tests.parity.cases import CASES

    config = RunConfig.model_validate(CASES[name])
    data = problems.two_inputs() if name.startswith("two") else problems.table()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)
    model = build_model(config, OneDevice(), data["validation"])
    return named_arrays(model.predict(data["validation"][0], verbose=0))


def check(name: str, found: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected(name).keys()
    for key, value in expected(name).items():
        assert len(value) == 50
        np.testing.assert_allclose(found[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_device(name: str) -> None:
    check(name, predict(name, {"kind": "one_device"}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_one_process(strategy: str) -> None:
    """A last batch of two rows leaves a replica of three without any."""
    for name in NAMES if strategy != "dtensor 8" else NAMES[:1]:
        check(name, predict(name, STRATEGIES[strategy]))


@pytest.mark.parametrize(
    "kind", ["multi_worker_mirrored", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jax", "dtensor"))]
)
def test_in_two_processes(kind: str, tmp_path: Path) -> None:
    """Each process has rows, or parts of the weights, that the other one does not have."""
    if kind == "jax":
        pytest.importorskip("jax")
    names = NAMES[:1] if kind == "dtensor" else NAMES[:2]  # its compiler takes long
    strategy = {"kind": kind, **(MESHES["4x2"] if kind != "multi_worker_mirrored" else {})}
    backend = "jax" if kind == "jax" else "tensorflow"
    environment = {"KERAS_BACKEND": backend, "STRATEGY": json.dumps(strategy)}
    arguments = [str(tmp_path / "found.npz"), *names]
    run_workers(tmp_path, "tests.parity.predict_case", arguments, backend=backend, **environment)
    with np.load(tmp_path / "found.npz") as found:
        for name in names:
            check(name, {key.removeprefix(f"{name}/"): found[key] for key in found if key.startswith(f"{name}/")})
