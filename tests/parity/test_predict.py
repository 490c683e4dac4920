"""Every strategy predicts what one device predicts, each example once and in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parity.test_jax import MESHES

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")

NAMES = ("mlp adam", "two inputs, two outputs", "subclassed")  # one array, a dict of arrays, a model that is built late
DEADLINE_S = 300
STRATEGIES = {
    "mirrored": {"kind": "mirrored", "replicas": 3},
    "dtensor 4x2": {"kind": "dtensor", **MESHES["4x2"]},
    "dtensor 8": {"kind": "dtensor", **MESHES["8"]},
}


def predict(name: str, kind: dict) -> dict[str, np.ndarray]:
    from distlaunch.cluster.spec import Task
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies import create
    from tests.parity.cases import CASES
    from tests.parity.predict_case import predict_case

    config = RunConfig.model_validate({**CASES[name], "strategy": kind})
    return predict_case(name, create(config, Task("worker", 0)), kind)


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    """Keras's own: the model called on all rows at once."""
    import keras

    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.one_device import OneDevice
    from distlaunch.training.build import build_model
    from distlaunch.training.predictions import named_arrays
    from tests.parity import problems
    from tests.parity.cases import CASES

    config = RunConfig.model_validate(CASES[name])
    data = problems.two_inputs() if name.startswith("two") else problems.table()
    keras.utils.clear_session()
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


def run(folder: Path, number: int, kind: dict, **environment: str) -> list[subprocess.Popen[str]]:
    import portpicker

    addresses = [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(number)]
    processes = []
    for index in range(number):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        own = {**os.environ, "STRATEGY": json.dumps(kind), "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
        if number > 1:
            own["TF_CONFIG"] = json.dumps(cluster)
        command = [sys.executable, "-m", "tests.parity.predict_case", str(folder / "found.npz"), *NAMES]
        processes.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    return processes


@pytest.mark.parametrize("kind", ["multi_worker_mirrored", "jax"])
def test_in_processes_of_their_own(kind: str, tmp_path: Path) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
        environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        processes = run(tmp_path, 1, {"kind": kind, **MESHES["4x2"]}, **environment)
    else:
        processes = run(tmp_path, 2, {"kind": kind})
    try:
        errors = [process.communicate(timeout=DEADLINE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors[0][-3000:]
    with np.load(tmp_path / "found.npz") as found:
        for name in NAMES:
            check(name, {key.removeprefix(f"{name}/"): found[key] for key in found if key.startswith(f"{name}/")})
